"""Faults of continuous batching, and of tensors that share a block of memory."""

from __future__ import annotations

from tests.mutations.mutant import mutant

BATCHING_TESTS = "unit/integrations/test_batching.py"
PAGED = "unit/capture/test_paged_cache.py"
SEAM = "unit/integrations/test_seam.py"
TRACING = "unit/capture/test_tracing.py"

BATCHING = (
    mutant(
        "each-layer-of-a-paged-cache-is-a-graph",
        "capture/paged_cache.py",
        "            value.update = MethodType(traceable, value)\n",
        "",
        PAGED,
    ),
    mutant(
        "a-step-of-continuous-batching-reads-its-arguments-early",
        "runtime/calls.py",
        "device_of(self._runner.settings.device).follow_default_stream()",
        "pass",
        "accelerator/test_caches.py",
    ),
    mutant(
        "views-of-a-paged-cache-count-once-each",
        "capture/paged_cache.py",
        "                setattr(tensor, SHARES_MEMORY, True)\n",
        "                pass\n",
        PAGED,
    ),
    mutant(
        "memory-that-lies-otherwise-has-the-same-plan",
        "capture/recording.py",
        "if recording.sharing == sharing and",
        "if",
        PAGED,
    ),
    mutant(
        "one-size-has-one-plan-however-memory-lies",
        "runtime/pass_table.py",
        "exact = (graph, graph.sharing_of(args), *(",
        "exact = (graph, *(",
        "unit/runtime/test_pass_table.py",
    ),
    mutant(
        "views-of-a-block-lie-at-its-beginning",
        "capture/fake_arguments.py",
        "arg.stride(), arg.storage_offset())",
        "arg.stride(), 0)",
        PAGED,
    ),
    mutant(
        "a-paged-cache-takes-the-free-memory-of-the-device",
        "integrations/transformers/batching.py",
        "        found.max_memory_percent = min(wanted / batching_memory_bytes(), 1.0)\n",
        "        pass\n",
        BATCHING_TESTS,
    ),
    mutant(
        "the-callers-settings-of-batching-change",
        "integrations/transformers/batching.py",
        "else copy.copy(config)",
        "else config",
        BATCHING_TESTS,
    ),
    mutant(
        "batching-records-graphs-of-the-device",
        "integrations/transformers/batching.py",
        "    found.use_cuda_graph = False\n",
        "",
        BATCHING_TESTS,
    ),
    mutant(
        "dynamo-compiles-the-hooks-of-an-engine",
        "integrations/deepspeed/seam.py",
        "    _keep_hooks_from_compiler(engine)\n",
        "",
        SEAM,
    ),
    mutant(
        "hooks-that-are-captured-are-skipped",
        "integrations/deepspeed/seam.py",
        "if model._parameters or trace_rules",
        "if trace_rules",
        SEAM,
    ),
    mutant(
        "models-of-an-engine-are-traced-slowly",
        "capture/tracing.py",
        '    str(_TORCH / "nn" / "modules" / "module.py"),\n',
        "",
        TRACING,
    ),
)
