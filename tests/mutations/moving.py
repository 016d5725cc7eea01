"""Faults of the seams: the files in which a model is taken over, run without a plan, given back."""

from __future__ import annotations

from tests.mutations.mutant import mutant

FALLBACK = "unit/execution/test_fallback.py"
OFFLOAD = "unit/integrations/test_offload.py"

MOVING = (
    mutant(
        "changed-weights-are-taken-for-resident",
        "session.py",
        "self._residents.clear()  # whoever filled a parameter may have changed it",
        "pass",
        "integration/test_weight_changes.py::test_a_changed_weight_is_that_of_the_next_call"
        "[small-1-gathered]",
        is_named=True,
    ),
    mutant(
        "a-hooked-model-steps-aside",
        "session.py",
        "and not self._hooks\n",
        "and True\n",
        "integration/test_aside.py::test_a_hook_sees_the_ops_as_long_as_it_is_there",
    ),
    mutant(
        "views-of-a-weight-may-be-written",
        "execution/fallback.py",
        "in self._fetched + self._viewed):",
        "in self._fetched):",
        FALLBACK,
        is_named=True,
    ),
    mutant(
        "weights-may-be-written-without-a-plan",
        "execution/fallback.py",
        "if any(tensor._version != version for",
        "if any(False for",
        FALLBACK,
    ),
    mutant(
        "dictionaries-of-parameters-are-not-given-back",
        "integrations/offload.py",
        "module._parameters = parameters",
        "pass",
        OFFLOAD,
        is_named=True,
    ),
    mutant(
        "torchs-linear-stays-exchanged",
        "integrations/offload.py",
        "torch.nn.functional.linear = found",
        "pass",
        OFFLOAD,
    ),
    mutant(
        "stock-hooks-come-back-while-attached",
        "integrations/offload.py",
        "super()._register_deepspeed_module(module, [0] if count is None else count)\n\n    def",
        "pass\n        super()._register_deepspeed_module(module, [0])\n\n    def",
        OFFLOAD,
    ),
    mutant(
        "weights-without-data-are-taken",
        "execution/stores.py",
        "if parameter.is_meta:",
        "if False:",
        "unit/execution/test_stores.py::test_a_parameter_on_the_meta_device_is_refused_by_name",
    ),
)
