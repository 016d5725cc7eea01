"""Where all of a model fits, torch runs it by itself; unless somebody wants to see its ops."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.runtime.handle import Handle
from tests.integration.families import tiny


class Rig:
    """A small model under an ample budget, and what plain torch makes of one argument."""

    def __init__(self) -> None:
        self.model = tiny()
        self.x = torch.randn(3, 16)
        with torch.no_grad():
            self.plain = self.model(self.x)
        self.handle: Handle = attach(self.model, device_budget="1GiB", device="cpu")

    def steps_aside(self) -> bool:
        """Run once, compare, and tell whether torch ran it by itself."""
        before = self.handle.stats.num_resident_runs
        with torch.no_grad():
            assert torch.equal(self.model(self.x), self.plain)
        return self.handle.stats.num_resident_runs > before


@pytest.fixture
def rig() -> Iterator[Rig]:
    torch._dynamo.reset()
    made = Rig()
    yield made
    made.handle.detach()


def test_an_ample_budget_leaves_the_model_to_torch(rig: Rig) -> None:
    assert rig.steps_aside()
    assert rig.handle.stats.reloaded_bytes == rig.handle.stats.weight_bytes
    assert rig.steps_aside()
    assert rig.handle.stats.reloaded_bytes == rig.handle.stats.weight_bytes


def test_a_hook_sees_the_ops_as_long_as_it_is_there(rig: Rig) -> None:
    assert rig.steps_aside()
    seen: list[str] = []
    remove = rig.handle.register_op_hook(before=lambda task, _: seen.append(task.op))
    assert not rig.steps_aside()
    assert len(seen) == rig.handle.stats.passes[0].num_tasks > 0
    remove()
    assert rig.steps_aside()
    assert len(seen) == rig.handle.stats.passes[0].num_tasks


@pytest.mark.parametrize("debug", ({"poison_vacated": True}, {"lane_delay_seed": 1}), ids=str)
def test_debugging_looks_at_the_plan(rig: Rig, debug: dict[str, int]) -> None:
    assert rig.steps_aside()
    rig.handle.replan(debug=DebugConfig(**debug))
    assert not rig.steps_aside()
    rig.handle.replan(debug=DebugConfig())
    assert rig.steps_aside()


def test_a_policy_that_is_not_cyclic_and_a_small_budget_run_the_plan(rig: Rig) -> None:
    assert rig.steps_aside()
    rig.handle.replan(policy="horizon")
    assert not rig.steps_aside()
    rig.handle.replan(policy="finepage")
    assert rig.steps_aside()
    rig.handle.replan(budget_bytes=rig.handle.stats.min_budget_bytes)
    assert not rig.steps_aside()
