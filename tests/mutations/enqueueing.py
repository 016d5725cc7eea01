"""Faults in what a pass costs the host: bundles, the call's tensors, direct calls."""

from __future__ import annotations

from tests.mutations.mutant import mutant

BUNDLES = "unit/execution/test_bundles.py"
EXECUTOR = "unit/execution/test_executor.py"
RESIDENCY = "unit/execution/test_executor_residency.py"
SMALL = "accelerator/test_small_weights.py"

ENQUEUEING = (
    mutant(
        "bundles-are-copied-one-by-one",
        "execution/bound_plan.py",
        "next_of=self._bundles.next_of",
        "next_of={}",
        BUNDLES,
        is_named=True,
    ),
    mutant(
        "a-bundle-waits-for-its-first-part-alone",
        "execution/program.py",
        "return is_next and all(n <= k for n, k in zip(need, self.known, strict=True))",
        "return is_next",
        BUNDLES,
        is_named=True,
    ),
    mutant(
        "a-bundle-leaves-its-lane",
        "execution/program.py",
        "is_next = next_of.get(self.nodes[-1].id) == node.id",
        "is_next = node.id in next_of.values()",
        BUNDLES,
    ),
    mutant(
        "bundles-span-two-allocations",
        "execution/bundles.py",
        "and theirs.untyped_storage().data_ptr() == ours.untyped_storage().data_ptr()",
        "",
        BUNDLES,
    ),
    mutant(
        "bundles-have-gaps-in-host-memory",
        "execution/bundles.py",
        "and theirs.data_ptr() - ours.data_ptr() == self.extent.nbytes",
        "",
        BUNDLES,
    ),
    mutant(
        "bundles-have-gaps-in-the-arena",
        "execution/bundles.py",
        "and self.extent.end == other.extent.offset",
        "",
        BUNDLES,
    ),
    mutant(
        "bundles-have-any-size",
        "execution/bundles.py",
        " and bundle_bytes + nbytes <= MOST_BUNDLE_BYTES:",
        ":",
        BUNDLES,
    ),
    mutant(
        "bundled-offloads-go-the-wrong-way",
        "execution/bound_plan.py",
        "if step.node.kind is NodeKind.OFFLOAD\n",
        "if False\n",
        BUNDLES,
    ),
    mutant(
        "bundles-have-one-span",
        "execution/executor.py",
        "if missing or self.recorder is not None:",
        "if missing:",
        BUNDLES,
    ),
    mutant(
        "a-pass-behind-another-is-lowered-each-time",
        "execution/executor.py",
        "if missing not in self._programs:",
        "if True:",
        RESIDENCY,
    ),
    mutant(
        "lowered-passes-are-kept-without-end",
        "execution/executor.py",
        "if len(self._programs) == MOST_PROGRAMS:",
        "if False:",
        RESIDENCY,
    ),
    mutant(
        "masters-of-small-weights-lie-apart",
        "execution/masters.py",
        "weight.master = block[begin : begin + weight.nbytes].copy_(weight.master)",
        "weight.master = found.pinned(weight.master)",
        SMALL,
    ),
    mutant(
        "a-detached-parameter-keeps-the-masters-of-others",
        "execution/masters.py",
        "value = value.clone()",
        "pass",
        SMALL,
    ),
    mutant(
        "indices-have-the-form-of-the-last-call",
        "execution/reload_sources.py",
        "if held is None or held.shape != given.shape:",
        "if held is None:",
        SMALL,
    ),
    mutant(
        "tasks-get-arguments-that-modes-forbid",
        "execution/call_tensors.py",
        "and not (arg.requires_grad or arg.is_inference())",
        "",
        EXECUTOR,
    ),
    mutant(
        "callers-get-their-own-argument-back",
        "execution/call_tensors.py",
        " - self._returned",
        "",
        EXECUTOR,
    ),
    mutant(
        "outputs-lose-the-begin-of-their-buffer",
        "execution/call_tensors.py",
        " and _begins_its_buffer(v)",
        "",
        EXECUTOR,
    ),
    mutant(
        "tasks-of-the-calls-tensors-are-called-by-the-schema",
        "execution/bound_plan.py",
        "call = direct_call(bound.call, args, kwargs)",
        "call = bound.call",
        "unit/execution/test_direct_calls.py",
    ),
)
