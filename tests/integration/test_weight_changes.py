"""Weights that are changed from outside while a model is attached: the next call uses them.

PYTEST_DONT_REWRITE: else pytest prints parameters, and those here may have no bytes to print.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from ds_finepage.api import attach
from ds_finepage.session import Handle

WIDTH = 64


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.set_num_threads(1)
    torch._dynamo.reset()


class Rig:
    """A small model of which some weights stay in the arena and others stream, and a plain twin."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]
        self.model = nn.Sequential(*layers).eval().requires_grad_(False)
        self.masters = [layer.weight.data for layer in layers]
        self.plain = copy.deepcopy(self.model)
        self.x = torch.randn(3, WIDTH)
        self.handle: Handle = attach(self.model, device_budget="1GiB", device="cpu")

    def run(self) -> None:
        """Compare with the twin."""
        with torch.no_grad():
            found, expected = self.model(self.x), self.plain(self.x)
        assert torch.equal(found, expected)

    def shrink(self) -> None:
        """Let some of the weights stay resident from call to call, and the others stream."""
        self.run()
        least, needed = self.handle.stats.min_budget_bytes, self.handle.stats.needed_budget_bytes
        self.handle.replan(budget_bytes=least + (needed - least) * 3 // 4)
        for _ in range(3):
            self.run()
        ((memgraph, _),) = self.handle.plans()
        assert 1 < len(memgraph.entry) < 6


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.handle.detach()


def gathered(parameter: nn.Parameter, master: torch.Tensor, new: torch.Tensor) -> None:
    """Change a weight as ``GatheredParameters`` does: in the master, which it leaves for good."""
    parameter.data = master
    master.copy_(new)
    parameter.data = torch.empty(0)


def assigned(parameter: nn.Parameter, master: torch.Tensor, new: torch.Tensor) -> None:
    parameter.data = new.clone()


CHANGES: dict[str, Callable[[nn.Parameter, torch.Tensor, torch.Tensor], None]] = {
    "gathered": gathered,
    "assigned": assigned,
}


@pytest.mark.parametrize("way", CHANGES)
@pytest.mark.parametrize("num_changed", (1, 6))
@pytest.mark.parametrize("is_small", (True, False), ids=("small", "ample"))
def test_a_changed_weight_is_that_of_the_next_call(
    rig: Rig, way: str, num_changed: int, is_small: bool
) -> None:
    if is_small:
        rig.shrink()
    for start in range(0, 6, num_changed):
        for index in range(start, start + num_changed):
            new = torch.randn(WIDTH, WIDTH)
            rig.plain[index].weight.data.copy_(new)
            CHANGES[way](rig.model[index].weight, rig.masters[index], new)
        rig.run()
        rig.run()
    rig.handle.detach()
    rig.run()
