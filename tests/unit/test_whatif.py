"""Plans for a machine that is known by its profile only."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ds_finepage import whatif
from ds_finepage.errors import ConfigError, PlanInfeasibleError
from ds_finepage.whatif import CapturedModel, plan_captured
from tests.property.experts import layers_of_experts
from tests.property.matmul_chains import matmul_chain
from tests.unit.planning.finepage.test_search import machine

PROFILE = machine(h2d=1e9)
CAPTURED = CapturedModel(
    model="chain",
    phase="decode",
    batch=1,
    seq=1,
    graph=matmul_chain([64, 1024, 64, 1024]),
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


def test_the_least_time_counts_the_wait_for_routers() -> None:
    graph = layers_of_experts(num_layers=4)
    captured = dataclasses.replace(CAPTURED, graph=graph)
    profile = machine(h2d=5e10)
    figures = plan_captured(
        captured, budget_bytes=graph.weight_bytes * 60 // 100 + (1 << 16), profile=profile
    ).figures
    link_ns = figures.lower_bound_bytes * 1e9 / profile.h2d_bytes_per_s
    assert max(figures.compute_ns, link_ns) < figures.lower_bound_ns <= figures.predicted_ns


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown policy 'finepge'"):
        plan_captured(CAPTURED, budget_bytes=1 << 30, profile=PROFILE, policy="finepge")


def test_needs_are_computed_once_for_each_kind_of_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [(cuts, rows) for cuts in (False, True) for rows in (False, True)]
    made = []

    def needs_of(_: object, *, cuts_weights: bool, looks_up_rows: bool, **__: object) -> object:
        made.append((cuts_weights, looks_up_rows))
        return made[-1]

    monkeypatch.setattr(whatif, "needs_of", needs_of)
    captured: Any = dataclasses.replace(CAPTURED)
    for cuts, rows in kinds * 2:
        found = captured.needs_if(cuts_weights=cuts, looks_up_rows=rows)
        assert found == (cuts, rows)
    assert made == kinds
