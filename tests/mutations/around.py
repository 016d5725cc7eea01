"""Faults of what is around a run: generations, engines, settings, figures, the command line."""

from __future__ import annotations

from tests.mutations.mutant import mutant

GENERATION = "unit/integrations/test_preflight.py"
SEAM = "unit/integrations/test_seam.py"
OTHERS = "integration/test_other_engines.py"
INSTRUMENTS = "integration/cli/test_instruments.py"

AROUND = (
    # Before and around a generation.
    mutant(
        "a-certificate-forgets-what-is-reloaded-between-passes",
        "cli/check.py",
        "reloaded = memgraph.reloaded_bytes + between",
        "reloaded = memgraph.reloaded_bytes",
        "integration/cli/test_show.py",
    ),
    mutant(
        "a-plan-is-not-verified",
        "cli/check.py",
        "certificate(check(codec.load_plan(arguments.file)))",
        "certificate(codec.load_plan(arguments.file))",
        "integration/cli/test_show.py",
    ),
    mutant(
        "every-command-is-imported",
        "cli/__init__.py",
        "for name in (asked,) if asked in COMMANDS else COMMANDS:",
        "for name in COMMANDS:",
        "integration/cli/test_show.py",
    ),
    mutant(
        "returned-sequences-need-no-cache",
        "integrations/transformers/preflight.py",
        "inputs.shape[0] * max(beams, returned)",
        "inputs.shape[0] * beams",
        GENERATION,
    ),
    mutant(
        "a-window-is-as-long-as-the-text",
        "integrations/transformers/preflight.py",
        "num_rows += min(longest.num_tokens, window)",
        "num_rows += longest.num_tokens",
        GENERATION,
    ),
    mutant(
        "keys-are-counted-without-values",
        "integrations/transformers/preflight.py",
        "return 2 * num_rows * longest.num_sequences",
        "return num_rows * longest.num_sequences",
        GENERATION,
    ),
    mutant(
        "the-cache-has-to-fit-into-host-memory-alone",
        "integrations/transformers/preflight.py",
        "if need_bytes <= budget_bytes + host_bytes:",
        "if need_bytes <= host_bytes:",
        GENERATION,
    ),
    mutant(
        "a-prompt-as-long-as-the-table-is-refused",
        "integrations/transformers/preflight.py",
        "longest.prompt_tokens <= positions:",
        "longest.prompt_tokens < positions:",
        GENERATION,
    ),
    # The seams that stay where they are.
    mutant(
        "every-later-engine-is-ours",
        "integrations/deepspeed/patches.py",
        "setattr(owner, name, stock)",
        "pass",
        SEAM,
    ),
    mutant(
        "the-engine-is-wrapped-twice",
        "integrations/deepspeed/patches.py",
        "if not is_wrapped(owner, name):",
        "if True:",
        SEAM,
    ),
    mutant(
        "stock-engines-are-refused-too",
        "integrations/deepspeed/seam.py",
        "        if config.enabled:\n            refuse",
        "        if True:\n            refuse",
        SEAM,
    ),
    mutant(
        "options-of-the-launcher-are-lost",
        "run.py",
        "sys.argv = [script, *launcher_options, *arguments[1:]]",
        "sys.argv = [script, *arguments[1:]]",
        "unit/test_run.py::test_the_script_gets_its_own_arguments",
    ),
    # Settings, figures and the command line.
    mutant(
        "a-budget-above-the-device-is-accepted",
        "config.py",
        "if budget_bytes > device_bytes:",
        "if False:",
        "unit/test_config.py",
    ),
    mutant(
        "unknown-keys-are-accepted",
        "config.py",
        'extra="forbid", frozen=True',
        'extra="ignore", frozen=True',
        "unit/test_config.py",
    ),
    mutant(
        "a-kilobyte-is-a-kibibyte",
        "units.py",
        '"kb": 10**3,',
        '"kb": 1024,',
        "unit/test_units.py",
    ),
    mutant(
        "the-meter-of-a-failed-script-stays-on",
        "cli/instruments.py",
        "metered.enter_context(meter)",
        "meter.__enter__()",
        INSTRUMENTS,
    ),
    mutant(
        "deepspeed-stays-patched-after-a-reading",
        "cli/instruments.py",
        'metered.callback(setattr, deepspeed, "initialize", original)',
        "metered.callback(lambda: None)",
        INSTRUMENTS,
    ),
    mutant(
        "a-reading-of-decode-is-that-of-the-prefill",
        "cli/instruments.py",
        "decode_reloaded_bytes=decode.last_reloaded_bytes,",
        "decode_reloaded_bytes=prefill.last_reloaded_bytes,",
        INSTRUMENTS,
        is_named=True,
    ),
    mutant(
        "every-forward-of-stock-is-a-prefill",
        "compare/counting.py",
        "self._is_prefill = input_ids.shape[-1] > 1",
        "self._is_prefill = input_ids.shape[-1] > 0",
        INSTRUMENTS,
    ),
    mutant(
        "a-peak-above-the-budget-is-no-problem",
        "cli/demo_results.py",
        "if peak_bytes > result.budget_bytes:",
        "if False:",
        "e2e/test_demo.py::test_the_exit_status_judges_the_result",
    ),
    mutant(
        "a-prefill-makes-one-token",
        "reporting/figures.py",
        'tokens = self.batch * (self.seq if self.phase == "prefill" else 1)',
        "tokens = self.batch",
        "unit/reporting/test_figures.py",
    ),
    mutant(
        "a-kv-cache-without-room-stays-on-the-device",
        "whatif.py",
        "forms = [captured, captured.on_host] if chosen.pages else [captured]",
        "forms = [captured]",
        "integration/test_kv_forecast.py",
        is_named=True,
    ),
    mutant(
        "other-systems-move-their-kv-cache",
        "whatif.py",
        "forms = [captured, captured.on_host] if chosen.pages else [captured]",
        "forms = [captured, captured.on_host]",
        "integration/test_kv_forecast.py",
    ),
    mutant(
        "a-step-forgets-that-the-prefill-moved-the-kv-cache",
        "cli/grid.py",
        "captured = captured.on_host or captured",
        "pass",
        "integration/test_kv_forecast.py",
    ),
    mutant(
        "host-memory-is-endless",
        "whatif.py",
        "if host_bytes <= host_memory_bytes:",
        "if True:",
        "integration/test_kv_forecast.py",
    ),
    mutant(
        "new-rows-stay-on-the-device",
        "capture/from_config.py",
        "for t in (logits, *new_rows))",
        "for t in (logits,))",
        "integration/test_from_config.py",
    ),
    mutant(
        "rows-of-the-source-are-no-kv",
        "whatif.py",
        " + of_source",
        "",
        "integration/test_from_config_encoders.py",
    ),
    mutant(
        "files-are-overwritten",
        "cli/options.py",
        "if path.exists() and not force:",
        "if False:",
        "integration/cli/test_probe.py::test_no_file_is_overwritten",
    ),
    mutant(
        "a-larger-budget-is-slower",
        "reporting/curve.py",
        "if best and best[-1].tokens_per_s > point.tokens_per_s:",
        "if False:",
        "unit/reporting/test_curve.py::test_a_larger_budget_can_use_a_smaller_ones_plan",
    ),
    # Engines of other packages.
    mutant(
        "a-fetch-of-accelerate-stays-an-alias",
        "compare/accelerate_arms.py",
        "fetched.data = fetched.data.clone()",
        "pass",
        OTHERS,
    ),
    mutant(
        "a-map-is-made-for-the-decode-step-alone",
        "compare/accelerate_arms.py",
        "return min(found)",
        "return found[-1]",
        OTHERS,
    ),
    mutant(
        "weights-stay-untied-after-accelerate",
        "compare/accelerate_arms.py",
        "self.model.tie_weights()",
        "pass",
        OTHERS,
    ),
    mutant(
        "modules-that-stay-on-the-cpu-do-not-count",
        "compare/accelerate_arms.py",
        "parameter.data = parameter.data.clone()",
        "pass",
        OTHERS,
    ),
    mutant(
        "a-group-keeps-its-copy",
        "compare/group_offload_arm.py",
        "tensor.data = self._masters.pop(tensor, tensor.data)",
        "pass",
        OTHERS,
    ),
    mutant(
        "counting-goes-on",
        "compare/group_offload_arm.py",
        "            setattr(self._group, name, method)",
        "            pass",
        OTHERS,
    ),
)
