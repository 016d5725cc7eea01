"""PyTorch's own samples of its ops, by plan under the least budget: equal to eager, or counted.

``FINEPAGE_OPINFO_SAMPLES=20 pytest -n 0 -m slow tests/integration/test_opinfo.py`` takes up to so
many samples of each op instead of one of every fourth.
"""

from __future__ import annotations

import copy
import itertools
import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_finepage.api import attach
from tests.integration.opinfo import FALLBACK, PLANNED, Outcome, op_db, try_sample

# PyTorch's samples use what PyTorch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore")

UNFILLED = "what it returns means nothing"
CUDA_ONLY = "eager PyTorch has it on CUDA only"
SKIPPED = {
    "as_strided_partial_views": "it reads beyond a copy of the tensor that it gets",
    "empty": UNFILLED,
    "empty_like": UNFILLED,
    "empty_permuted": UNFILLED,
    "empty_strided": UNFILLED,
    "new_empty": UNFILLED,
    "new_empty_strided": UNFILLED,
    "jiterator_2inputs_2outputs": CUDA_ONLY,
    "jiterator_4inputs_with_extra_args": CUDA_ONLY,
    "jiterator_binary": CUDA_ONLY,
    "jiterator_binary_return_by_ref": CUDA_ONLY,
    "jiterator_unary": CUDA_ONLY,
}
EVERY = 1 if "FINEPAGE_OPINFO_SAMPLES" in os.environ else 4
"""The list has the ops of a kind side by side, so a fourth of them has every kind."""
LOOK_AT = 6
"""Samples of an op of which the largest is taken."""


def samples(op: Any) -> list[Any]:
    """Return the samples of an op to run."""
    torch.manual_seed(0)
    made = op.sample_inputs("cpu", torch.float32, requires_grad=False)
    wanted = os.environ.get("FINEPAGE_OPINFO_SAMPLES")
    if wanted is not None:
        return list(itertools.islice(made, int(wanted)))
    return [max(itertools.islice(made, LOOK_AT), key=num_elements)]


def num_elements(sample: Any) -> int:
    leaves = torch.utils._pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Run them all; by name of the op."""
    pytest.importorskip("expecttest", reason="PyTorch's list of ops imports it")
    found: dict[str, Outcome] = {}
    ops = [op for op in op_db() if op.supports_dtype(torch.float32, "cpu")]
    for op in ops[::EVERY]:
        if op.formatted_name in SKIPPED:
            continue
        outcome = found[op.formatted_name] = Outcome()
        for sample in samples(op):
            try:
                try_sample(op, sample, outcome)
            except Exception as error:
                outcome.faults.append(f"{type(error).__name__}: {error}")
    return found


def test_every_op_gives_what_it_gives_in_eager_and_writes_nothing_else(
    outcomes: dict[str, Outcome],
) -> None:
    assert {name: o.faults for name, o in outcomes.items() if o.faults} == {}


def test_nearly_all_ops_are_planned(outcomes: dict[str, Outcome]) -> None:
    planned = [name for name, o in outcomes.items() if o.runs[PLANNED] and not o.runs[FALLBACK]]
    counted = [name for name, o in outcomes.items() if o.runs[FALLBACK]]
    assert len(planned) + len(counted) == len(outcomes) >= 600 // EVERY
    assert len(counted) < len(outcomes) // 10, counted


class Losses(nn.Module):
    """Ops that use ``out=`` for their own work, or have several overloads of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one = self.first(x).sigmoid()
        other = self.last(one).sigmoid()
        return (
            F.binary_cross_entropy(one, other),
            F.huber_loss(one, other),
            F.pairwise_distance(one, other),
            F.triplet_margin_loss(one, other, x),
            F.triplet_margin_with_distance_loss(one, other, x),
            other,
        )


def test_losses_are_planned_and_right() -> None:
    torch._dynamo.reset()
    model, x = Losses(), torch.randn(40, 32)
    with torch.no_grad():
        plain = model(x)
        handle = attach(model, device_budget="4MiB", device="cpu")
        for _ in range(2):
            assert all(map(torch.equal, model(x), plain))
            handle.replan(budget_bytes=handle.stats.min_budget_bytes)
    assert handle.stats.num_unplanned_graphs == 0


def test_an_op_that_changes_what_it_does_not_say_runs_without_a_plan() -> None:
    """Batch norm in training mode changes its running mean, and its schema does not tell."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    twin = copy.deepcopy(model)
    handle = attach(model, device_budget="1MiB", device="cpu")
    for num_rows in (6, 9, 12):  # sizes that differ from call to call too
        x = torch.randn(num_rows, 8)
        with torch.no_grad():
            assert torch.equal(model(x), twin(x))
        assert torch.equal(model[1].running_mean, twin[1].running_mean)
    assert handle.stats.num_unplanned_graphs == 3
    assert (
        "changes what it only reads, so it cannot be planned" in handle.stats.unplanned_reasons[0]
    )
