"""A pass is planned again on what it leaves, as often as is allowed."""

from __future__ import annotations

import pytest

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.planning.horizon import plan_horizon
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.settling import is_settled, settle
from tests.unit.planning.sketches import chain


@pytest.mark.parametrize(
    ("units", "rounds", "num_plans", "expected"),
    ((9, 8, 2, True), (9, 0, 1, False), (6, 3, 4, False)),
)
def test_planning_ends_when_a_pass_leaves_what_it_finds(
    units: int, rounds: int, num_plans: int, expected: bool
) -> None:
    entries = []

    def plan(problem: Problem) -> MemGraph:
        entries.append(problem.entry)
        return plan_horizon(problem)

    found = settle(plan, Problem(chain(8), units * 64), rounds)
    assert is_settled(found) is expected
    assert len(entries) == num_plans
    assert entries[0] == () and (num_plans == 1 or entries[-1] == found.entry != ())
