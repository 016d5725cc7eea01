"""Which weights are kept for good, evenly and without leaving room unused."""

from __future__ import annotations

import random

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.graph.memgraph import Extent
from ds_finepage.planning.finepage import small_arena
from ds_finepage.planning.finepage.small_arena import (
    least_lower_bytes,
    plan_keeping,
    sets_to_keep,
    settled_plan,
    spread,
    weights_by_first_use,
)
from ds_finepage.planning.problem import Problem
from tests.unit.planning.sketches import chain, sketch

UNIT = 64


def test_every_second_is_kept_in_half_of_the_room() -> None:
    sizes = dict.fromkeys(range(8), 64)
    assert spread(list(range(8)), sizes, 4 * 64) == {0, 2, 4, 6}


def test_room_that_the_even_choice_leaves_over_is_used() -> None:
    """Half of the room is due to the large ones, none of which fits; the small ones do."""
    sizes = {0: 640, 1: 640, 2: 64, 3: 64, 4: 64}
    assert spread([0, 1, 2, 3, 4], sizes, 3 * 64) == {2, 3, 4}


@pytest.mark.parametrize("seed", range(40))
def test_what_is_kept_fits_and_nothing_more_would(seed: int) -> None:
    rng = random.Random(seed)
    weights = list(range(rng.randint(1, 30)))
    sizes = {w: 64 * rng.randint(1, 12) for w in weights}
    room = rng.randint(0, sum(sizes.values()))
    kept = spread(weights, sizes, room)
    left = room - sum(sizes[w] for w in kept)
    assert left >= 0
    assert all(sizes[w] > left for w in weights if w not in kept)


def test_weights_come_by_their_first_use_and_unused_ones_not_at_all() -> None:
    graph = sketch("w0:64 w1:64 w2:64 a:64", "w2 -> a", "w0 a -> a", "w2 a ->")
    assert weights_by_first_use(graph) == [2, 0]


def test_the_lower_end_holds_what_is_not_kept() -> None:
    graph = sketch("w0:640 w1:64 a:64", "w0 -> a", "w1 a ->")
    assert least_lower_bytes(Problem(graph, 0, UNIT), set()) == 704
    assert least_lower_bytes(Problem(graph, 0, UNIT), {0}) == 128


def test_sets_to_keep_leave_room_for_the_rest() -> None:
    graph = chain(8)
    weights = weights_by_first_use(graph)
    problem = Problem(graph, 6 * UNIT, UNIT)
    found = sets_to_keep(problem)
    assert found[0] == frozenset(weights)
    assert found[-1] == frozenset()
    assert len(found) == len(set(found)) > 2
    for kept in found[1:]:
        assert len(kept) * UNIT + least_lower_bytes(problem, kept) <= 6 * UNIT


def test_what_is_kept_outside_the_arena_is_no_plan() -> None:
    graph = chain(3)
    assert plan_keeping(Problem(graph, 4 * UNIT, UNIT), {0: Extent(-UNIT, UNIT)}) is None


def test_the_published_algorithm_settles(monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = Problem(chain(8), 9 * UNIT, UNIT)
    found = settled_plan(roomy)
    assert found is not None
    assert set(check(found).entry) == set(found.exit) != set()
    monkeypatch.setattr(small_arena, "SETTLING_ROUNDS", 1)
    assert settled_plan(roomy) is None
