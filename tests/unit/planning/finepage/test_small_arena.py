"""Plans without a ring, by the two-horizon simulation."""

from __future__ import annotations

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.planning.finepage import small_arena
from ds_finepage.planning.finepage.small_arena import (
    plans_without_ring,
    settled_plan,
    weights_by_first_use,
)
from ds_finepage.planning.problem import Problem
from tests.unit.planning.sketches import chain, sketch

UNIT = 64


def test_weights_come_by_their_first_use_and_unused_ones_not_at_all() -> None:
    graph = sketch("w0:64 w1:64 w2:64 a:64", "w2 -> a", "w0 a -> a", "w2 a ->")
    assert weights_by_first_use(graph) == [2, 0]


def test_the_first_plan_without_a_ring_keeps_nothing() -> None:
    problem = Problem(chain(8), 9 * UNIT, UNIT)
    nothing, settled, from_full = plans_without_ring(problem)
    assert nothing is not None and settled is not None and from_full is not None
    assert len(check(from_full).entry) >= len(settled.entry) > 0
    assert check(nothing).entry == nothing.exit == ()
    assert settled.reloaded_bytes < nothing.reloaded_bytes == problem.graph.weight_bytes


def test_the_published_algorithm_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = Problem(chain(8), 9 * UNIT, UNIT)
    found = settled_plan(roomy)
    assert found is not None
    assert set(check(found).entry) == set(found.exit) != set()
    monkeypatch.setattr(small_arena, "SETTLING_ROUNDS", 1)
    assert settled_plan(roomy) is None
