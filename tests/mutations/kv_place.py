"""Faults of the place of a KV cache: on the device, or in host memory."""

from __future__ import annotations

from tests.mutations.mutant import mutant

OF_KV_PLACES = (
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
)
