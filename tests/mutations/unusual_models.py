"""Faults in what is made of models with unusual parts: transforms, TorchScript, odd parameters."""

from __future__ import annotations

from tests.mutations.mutant import mutant

RECORDING = "unit/capture/test_recording.py"
FALLBACK = "unit/execution/test_fallback.py"
WEIGHTS = "unit/execution/test_weight_table.py"

OF_UNUSUAL_MODELS = (
    mutant(
        "a-transform-stays-after-a-failed-capture",
        "capture/recording.py",
        "            with recorder, leaving_no_transform():\n",
        "            with recorder:\n",
        RECORDING,
    ),
    mutant(
        "a-reason-has-the-place-in-torchs-graph",
        "capture/recording.py",
        "            error.args = (_without_place(error), *error.args[1:])\n",
        "",
        RECORDING,
    ),
    mutant(
        "a-higher-order-op-is-named-by-torch",
        "capture/recording.py",
        '                if getattr(n.target, "namespace", "") != HIGHER_ORDER:\n',
        "                if True:\n",
        RECORDING,
    ),
    mutant(
        "a-transform-stays-after-a-failed-fallback",
        "execution/fallback.py",
        "    with torch.no_grad(), leaving_no_transform():\n        return _Fetching",
        "    with torch.no_grad():\n        return _Fetching",
        FALLBACK,
    ),
    mutant(
        "a-transform-stays-after-a-failed-resident-run",
        "execution/fallback.py",
        "    with torch.no_grad(), leaving_no_transform():\n        return module",
        "    with torch.no_grad():\n        return module",
        FALLBACK,
    ),
    mutant(
        "threads-do-not-survive-a-fork",
        "execution/lanes.py",
        "        if not self._thread.is_alive():",
        "        if False:",
        "unit/execution/test_lanes.py::test_threads_that_are_gone_start_again",
    ),
    mutant(
        "tensors-within-vmap-have-storages",
        "execution/fallback.py",
        "    while is_functorch_wrapped_tensor(value):",
        "    while False:",
        FALLBACK,
    ),
    mutant(
        "parameters-that-are-not-initialized-are-taken",
        "execution/masters.py",
        "        if is_lazy(parameter):\n",
        "        if False:\n",
        WEIGHTS,
    ),
    mutant(
        "sparse-parameters-are-taken",
        "execution/masters.py",
        "        if parameter.layout is not torch.strided:\n",
        "        if False:\n",
        WEIGHTS,
    ),
    mutant(
        "an-expanded-parameter-is-written-back",
        "execution/masters.py",
        " and not _overlaps(before):",
        ":",
        WEIGHTS,
    ),
    mutant(
        "weights-of-torchscript-are-taken",
        "api.py",
        "        if isinstance(part, torch.jit.ScriptModule) and",
        "        if False and",
        "unit/runtime/test_handle.py",
    ),
    mutant(
        "parts-of-torchscript-are-looked-at",
        "runtime/interception.py",
        "self._modules if isinstance(m._parameters, dict)]",
        "self._modules]",
        "unit/runtime/test_interception.py",
    ),
)
