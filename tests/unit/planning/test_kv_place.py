"""The place of a KV cache: the one whose plan takes least time, and the plans that this takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.planning import kv_place
from ds_finepage.planning.kv_place import plan_fastest
from ds_finepage.planning.pipeline import plan_checked
from tests.unit.planning.sketches import chain
from tests.unit.planning.test_pipeline import SETTINGS, UNIT

GRAPH = chain(9)


def simulated(
    monkeypatch: pytest.MonkeyPatch, least: list[int], times: list[int | None]
) -> list[int]:
    """Give places least times and the times of plans, None for no plan; list what is planned.

    The size of an arena stands for the place.
    """
    made: list[int] = []

    def plan(graph: object, at: int, settings: object) -> SimpleNamespace:
        made.append(at)
        if times[at] is None:
            raise PlanInfeasibleError(f"no room in place {at}")
        return SimpleNamespace(timeline=SimpleNamespace(total_ns=times[at]))

    monkeypatch.setattr(kv_place, "_least_ns", lambda graph, at, settings: least[at])
    monkeypatch.setattr(kv_place, "plan_checked", plan)
    return made


@pytest.mark.parametrize(
    ("least", "times", "planned", "chosen", "told"),
    [
        ([1000, 1500], [1200, 1600], [0], 0, 1500),  # its bound rules the other one out
        ([1000, 1199], [1200, 1199], [0], 0, 1199),  # a gain below 0.1% is not looked for
        ([1000, 1190], [1200, 1190], [0, 1], 1, 1200),
        ([1000, 1000], [1200, 1100], [0, 1], 1, 1200),
        ([1000, 1000], [1200, 1200], [0, 1], 0, 1200),  # equal plans: the first
        ([1000, 500], [1200, 600], [1], 1, 1000),  # the smaller bound is planned first
        ([1000, 500], [1200, 1100], [1, 0], 1, 1200),
        ([1000, 500], [1100, 1200], [1, 0], 0, 1200),
        ([1000, 500], [1000, 1000], [1, 0], 0, 1000),  # the first may still be as fast
        ([10000, 9995], [10001, 9996], [0], 0, 9995),  # bounds this near say nothing
        ([1000, 500], [1200, None], [1, 0], 0, None),
        ([1000, 1000], [None, 1200], [0, 1], 1, None),
    ],
)
def test_the_place_with_the_fastest_plan_is_chosen_with_as_few_plans_as_that_takes(
    least: list[int],
    times: list[int | None],
    planned: list[int],
    chosen: int,
    told: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = simulated(monkeypatch, least, times)
    found = plan_fastest([(GRAPH, 0), (GRAPH, 1)], SETTINGS)
    assert (made, found.index, found.other_ns) == (planned, chosen, (told,))
    assert found.planned.timeline.total_ns == times[chosen]


def test_the_refusal_of_the_first_place_is_raised_if_no_place_has_a_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = simulated(monkeypatch, [1000, 500], [None, None])
    with pytest.raises(PlanInfeasibleError, match="^no room in place 0$"):
        plan_fastest([(GRAPH, 0), (GRAPH, 1)], SETTINGS)
    assert made == [1, 0]


def test_one_place_is_planned_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_place, "_least_ns", None)
    found = plan_fastest([(GRAPH, 5 * UNIT)], SETTINGS)
    assert (found.index, found.other_ns) == (0, ())


@pytest.mark.parametrize("faster", [0, 1])
def test_plans_of_real_passes_agree_with_their_bounds(faster: int) -> None:
    """More room is what makes a place faster here."""
    arenas = [2 * UNIT, 2 * UNIT]
    arenas[faster] = 9 * UNIT
    found = plan_fastest([(GRAPH, arena_bytes) for arena_bytes in arenas], SETTINGS)
    both = [plan_checked(GRAPH, arena_bytes, SETTINGS) for arena_bytes in arenas]
    times = [planned.timeline.total_ns for planned in both]
    assert times[faster] < times[1 - faster]
    assert found.index == faster and found.planned.memgraph == both[faster].memgraph
    (told,) = found.other_ns
    assert told is not None and times[faster] <= told <= times[1 - faster]
