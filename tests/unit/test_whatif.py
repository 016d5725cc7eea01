"""Plans for a machine that is known by its profile only."""

from __future__ import annotations

import pytest

from ds_finepage.errors import ConfigError, PlanInfeasibleError
from ds_finepage.whatif import CapturedModel, plan_captured
from tests.property.matmul_chains import matmul_chain
from tests.unit.planning.finepage.test_search import machine

PROFILE = machine(h2d=1e9)
CAPTURED = CapturedModel(
    model="chain",
    phase="decode",
    batch=1,
    seq=1,
    graph=matmul_chain([64, 1024, 64, 1024]),
    capture_seconds=0,
)


@pytest.mark.parametrize("split", (False, True))
def test_a_refused_budget_is_answered_with_one_that_is_enough(split: bool) -> None:
    with pytest.raises(PlanInfeasibleError) as caught:
        plan_captured(CAPTURED, budget_bytes=1, profile=PROFILE, split=split)
    least = caught.value.min_budget_bytes
    assert least is not None and f"finepage.device_budget to >= {least} " in str(caught.value)
    found = plan_captured(CAPTURED, budget_bytes=least, profile=PROFILE, split=split)
    assert found.figures.min_budget_bytes == least
    assert found.figures.peak_bytes <= least
    assert (least < CAPTURED.needs.min_budget_bytes) is split
    with pytest.raises(PlanInfeasibleError):
        plan_captured(CAPTURED, budget_bytes=least - 1, profile=PROFILE, split=split)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown policy 'finepge'"):
        plan_captured(CAPTURED, budget_bytes=1 << 30, profile=PROFILE, policy="finepge")
