"""Weights that are changed from outside while a model is attached: the next call uses them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ds_finepage.api import attach
from ds_finepage.errors import StoreError
from ds_finepage.runtime.handle import Handle

pytestmark = pytest.mark.usefixtures("fresh")

WIDTH = 64


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
def rig() -> Rig:
    return Rig()


def written(parameter: nn.Parameter, master: torch.Tensor, new: torch.Tensor) -> None:
    parameter.copy_(new)


def written_as_data(parameter: nn.Parameter, master: torch.Tensor, new: torch.Tensor) -> None:
    parameter.data.copy_(new)


def set_and_written(parameter: nn.Parameter, master: torch.Tensor, new: torch.Tensor) -> None:
    parameter.data = master
    master.copy_(new)


def assigned(parameter: nn.Parameter, master: torch.Tensor, new: torch.Tensor) -> None:
    parameter.data = new.clone()


CHANGES: dict[str, Callable[[nn.Parameter, torch.Tensor, torch.Tensor], None]] = {
    way.__name__: way for way in (written, written_as_data, set_and_written, assigned)
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


def test_plans_for_another_dtype_are_forgotten(rig: Rig) -> None:
    rig.shrink()
    rig.run()
    (before,) = rig.handle.stats.passes
    for model in (rig.model, rig.plain):
        model.bfloat16()
    rig.x = rig.x.bfloat16()
    rig.run()
    (after,) = rig.handle.stats.passes
    assert after.lower_bound_bytes < before.lower_bound_bytes


@pytest.mark.parametrize("is_small", (True, False), ids=("small", "ample"))
def test_another_module_is_that_of_the_next_call(rig: Rig, is_small: bool) -> None:
    if is_small:
        rig.shrink()
    new = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
    rig.model[2], rig.plain[2] = new, copy.deepcopy(new)
    for _ in range(2):
        rig.run()
        new.weight.mul_(2)
        rig.plain[2].weight.mul_(2)
    assert new.weight in rig.handle._weights and not rig.handle.stats.unplanned_reasons


def test_a_module_that_cannot_be_taken_is_refused_and_the_old_one_goes_on(rig: Rig) -> None:
    rig.shrink()
    old = rig.model[2]
    rig.model[2] = nn.Linear(WIDTH, WIDTH, device="meta")
    for _ in range(2):
        with pytest.raises(StoreError, match="parameter 2.weight is on the meta device"):
            rig.model(rig.x)
    rig.model[2] = old
    rig.run()
