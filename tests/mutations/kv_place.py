"""Faults of the place of a KV cache: on the device, or in host memory."""

from __future__ import annotations

from tests.mutations.mutant import mutant

OF_KV_PLACES = (
    mutant(
        "a-cache-has-its-new-name-alone",
        "_compat/transformers.py",
        'CACHE_NAMES = ("past_key_values", "cache")',
        'CACHE_NAMES = ("cache",)',
        "unit/test_compat.py",
    ),
    mutant(
        "a-cache-has-its-old-name-alone",
        "_compat/transformers.py",
        'CACHE_NAMES = ("past_key_values", "cache")',
        'CACHE_NAMES = ("past_key_values",)',
        "unit/test_compat.py",
    ),
    mutant(
        "a-cache-that-starts-on-the-host-does-not",
        "runtime/kv_offload.py",
        "if starts_on_host and not host_layers(own.caches()):",
        "if False:",
        "unit/runtime/test_kv_offload.py",
    ),
    mutant(
        "the-config-does-not-move-a-cache",
        "runtime/plan_runner.py",
        "starts_on_host=starts)",
        "starts_on_host=False)",
        "integration/test_kv_on_host.py",
    ),
    mutant(
        "every-policy-moves-a-cache",
        "runtime/settings.py",
        'return self.config.kv_cache == "host" and self.moves_kv_caches',
        'return self.config.kv_cache == "host"',
        "integration/test_kv_on_host.py",
    ),
    mutant(
        "a-key-without-effect-is-not-told",
        "api.py",
        'if found.kv_cache == "host" and not policy_named(found.policy).pages:',
        "if False:",
        "integration/test_kv_on_host.py",
    ),
    mutant(
        "a-kv-cache-is-on-the-device-where-host-memory-is-faster",
        "whatif.py",
        "if as_in_a_run or not policy_named(policy).is_cyclic:",
        "if True:",
        "integration/test_kv_forecast.py",
        is_named=True,
    ),
    mutant(
        "nobody-says-that-a-run-does-not-choose-the-place-by-time",
        "cli/plan.py",
        "if planned.figures.kv_on_host and planned.figures.kv_elsewhere_ns is not None:",
        "if False:",
        "integration/test_kv_forecast.py",
    ),
    mutant(
        "other-policies-choose-the-place-of-their-kv-cache",
        "whatif.py",
        "if as_in_a_run or not policy_named(policy).is_cyclic:",
        "if as_in_a_run:",
        "integration/test_kv_forecast.py",
    ),
    mutant(
        "a-run-is-predicted-with-the-kv-cache-in-the-faster-place",
        "whatif.py",
        "if as_in_a_run or not policy_named(policy).is_cyclic:",
        "if not policy_named(policy).is_cyclic:",
        "integration/test_kv_forecast.py",
    ),
    mutant(
        "a-curve-has-the-kv-cache-where-no-run-has-it",
        "cli/curve.py",
        "as_in_a_run=True",
        "as_in_a_run=False",
        "integration/test_kv_forecast.py",
    ),
    mutant(
        "a-grid-has-the-kv-cache-where-no-run-has-it",
        "cli/grid.py",
        "as_in_a_run=True",
        "as_in_a_run=False",
        "integration/test_kv_forecast.py",
    ),
    mutant(
        "a-comparison-has-the-kv-cache-where-no-run-has-it",
        "compare/modelling.py",
        "as_in_a_run=True",
        "as_in_a_run=False",
        "integration/compare/test_modelling.py",
    ),
    mutant(
        "the-faster-place-has-endless-host-memory",
        "whatif.py",
        "*(place for place in others if place[0].host_bytes <= host_memory_bytes)",
        "*others",
        "integration/test_kv_forecast.py",
    ),
    mutant(
        "both-places-of-a-kv-cache-are-planned-always",
        "planning/kv_place.py",
        "return least_ns > other_ns * ((1 - MIN_GAIN) if other < at else 1)",
        "return False",
        "unit/planning/test_kv_place.py",
    ),
    mutant(
        "the-place-with-the-smaller-bound-is-planned-last",
        "planning/kv_place.py",
        "if least_ns[at] < least_ns[first] * (1 - MIN_GAIN):",
        "if False:",
        "unit/planning/test_kv_place.py",
    ),
    mutant(
        "the-place-that-is-planned-last-is-chosen",
        "planning/kv_place.py",
        "best = min(plans, key=lambda at: (plans[at].timeline.total_ns, at))",
        "best = list(plans)[-1]",
        "unit/planning/test_kv_place.py",
    ),
)
