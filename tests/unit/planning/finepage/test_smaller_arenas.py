"""The plans that a search takes from smaller arenas."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.budget import non_arena_bytes
from ds_finepage.planning.finepage import search as finepage_search
from ds_finepage.planning.finepage.forecast import Forecast
from ds_finepage.planning.finepage.options import DEFAULTS, FinepageOptions
from ds_finepage.planning.finepage.search import _Search, _with_rows, plan_finepage
from ds_finepage.planning.liveness import needed_arena_bytes
from ds_finepage.planning.problem import Problem
from tests.property.matmul_chains import matmul_chain
from tests.unit.planning.finepage.test_search import LONG, UNIT, machine, planned
from tests.unit.planning.sketches import chain

GRAPH = chain(16)

Tried = list[tuple[str, int]]
"""How an arena is searched, and its units."""


@functools.cache
def plans_by_units() -> dict[int, MemGraph]:
    return {units: planned(GRAPH, units) for units in range(4, 15)}


def in_rooms(
    monkeypatch: pytest.MonkeyPatch,
    searched_ns: dict[int, int],
    settled_ns: dict[int, int] | None = None,
    *,
    most_tasks: int = 16,
) -> tuple[int, Tried]:
    """Plan a pass of 16 tasks of 100 ns in 20 units, with searches that find given plans.

    Args:
        monkeypatch: Replaces the searches.
        searched_ns: The time of the plan in an arena of so many units; no room in others.
        settled_ns: The same of the plan by the published algorithm.
        most_tasks: The tasks of a short pass.

    Returns:
        The bytes that the plan takes, and the arenas that are searched.
    """
    settled_ns, tried, times_ns = settled_ns or {}, [], {}
    plans = plans_by_units()

    def plan(units: int, arena_bytes: int, total_ns: int) -> MemGraph:
        found = dataclasses.replace(plans[units], arena_bytes=arena_bytes)
        times_ns[found.peak_bytes] = total_ns
        return found

    def search(problem: Problem, options: FinepageOptions) -> _Search:
        units = problem.arena_bytes // UNIT
        tried.append(("all" if options.settles else "rings", units))
        if units not in searched_ns:
            raise PlanInfeasibleError("no room")
        found = _Search(problem, options)
        found.offer(plan(units - 6, problem.arena_bytes, searched_ns[units]))
        found._simulated_ns = settled_ns.get(units, math.inf)
        return found

    def settle(problem: Problem, options: FinepageOptions) -> list[MemGraph | None]:
        units = problem.arena_bytes // UNIT
        tried.append(("settling", units))
        if units not in settled_ns:
            return [None]
        return [plan(units - 12, problem.arena_bytes, settled_ns[units])]

    monkeypatch.setattr(finepage_search, "_searched", search)
    monkeypatch.setattr(finepage_search, "settling_plans", settle)
    monkeypatch.setattr(
        finepage_search, "predicted_ns", lambda plan, *_, **__: (times_ns[plan.peak_bytes], 0)
    )
    all_bytes = needed_arena_bytes(GRAPH, UNIT) + non_arena_bytes(GRAPH, UNIT)
    steps = tuple(step * (UNIT + 0.1) / all_bytes for step in (1, 2, 3, 4))
    options = FinepageOptions(smaller_arenas=steps, most_tasks_of_short=most_tasks)
    found = plan_finepage(Problem(GRAPH, 20 * UNIT, UNIT, machine(h2d=1e15)), options)
    assert check(found).arena_bytes == 20 * UNIT
    return found.peak_bytes // UNIT, tried


@pytest.mark.parametrize(
    ("searched_ns", "taken", "tried"),
    [
        ({20: 2000, 19: 1900, 18: 1950, 17: 1800}, 13, [("all", 20), ("rings", 19), ("rings", 18)]),
        ({20: 2000, 19: 1950, 18: 1900, 17: 1800}, 12, [("all", 20), ("rings", 19), ("rings", 18)]),
        ({20: 2000, 19: 2100, 18: 2001}, 14, [("all", 20), ("rings", 19), ("rings", 18)]),
        ({20: 2000}, 14, [("all", 20), ("rings", 19)]),  # no room
        ({20: 1601, 19: 1600}, 14, [("all", 20)]),  # the tasks alone take 1,600
        ({20: 2000, 19: 1601, 18: 1600}, 13, [("all", 20), ("rings", 19)]),
    ],
)
def test_a_plan_of_a_smaller_arena_is_taken_if_it_is_faster(
    searched_ns: dict[int, int], taken: int, tried: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_rooms(monkeypatch, searched_ns) == (taken, tried)


ROOMS = {20: 2000, 19: 2100, 18: 2100}
FIRST = [("all", 20), ("rings", 19), ("settling", 19), ("rings", 18), ("settling", 18)]


@pytest.mark.parametrize(
    ("searched_ns", "settled_ns", "taken", "tried"),
    [
        (ROOMS, {20: 2000, 17: 1900}, 5, [*FIRST, ("settling", 17), ("settling", 16)]),
        (ROOMS, {20: 2000, 18: 1601}, 6, FIRST),
        (ROOMS, {20: 2000, 18: 1630}, 6, FIRST),  # this plan is good
        (ROOMS, {20: 2050, 17: 1900}, 14, [("all", 20), ("rings", 19), ("rings", 18)]),
        ({20: 2000, 19: 1900}, {20: 2000}, 13, [("all", 20), ("rings", 19), ("rings", 18)]),
    ],
)
def test_more_arenas_are_tried_where_the_published_algorithm_finds_good_plans(
    searched_ns: dict[int, int],
    settled_ns: dict[int, int],
    taken: int,
    tried: Tried,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert in_rooms(monkeypatch, searched_ns, settled_ns) == (taken, tried)


def test_a_long_pass_is_tried_with_a_ring_alone_in_smaller_arenas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rooms = {20: 2000, 19: 1900, 18: 1850, 17: 1800}
    settled = dict.fromkeys(rooms, 1900)  # such plans of a long pass take long to make
    tried = [("all", 20), ("rings", 19), ("rings", 18)]
    assert in_rooms(monkeypatch, rooms, settled, most_tasks=15) == (12, tried)


def test_a_long_pass_without_forecasts_is_tried_in_one_smaller_arena(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(finepage_search, "can_forecast", lambda _: False)
    rooms = {20: 2000, 19: 1900, 18: 1850}
    tried = [("all", 20), ("rings", 19)]
    assert in_rooms(monkeypatch, rooms, most_tasks=15) == (13, tried)


def test_more_bytes_of_a_smaller_arena_have_to_save_time() -> None:
    problem = Problem(GRAPH, 20 * UNIT, UNIT, machine(h2d=1e6))

    def best_bytes(other_ns: int) -> int:
        mine, other = _Search(problem, LONG), _Search(problem, LONG)
        for search, moved, total_ns in ((mine, 7778, 100_000), (other, 7980, other_ns)):
            search.offer(Forecast(total_ns, moved, lambda: plans_by_units()[10]))
        mine.offer_best_of(other)
        return mine._plans.best.moved_bytes

    assert [best_bytes(other_ns) for other_ns in (99_800, 99_950, 100_100)] == [7980, 7778, 7778]


@pytest.mark.parametrize("most_tasks", [15, 16])
def test_without_a_profile_a_pass_is_planned_in_its_arena_alone(
    most_tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finepage_search, "_smaller_arenas", None)
    options = FinepageOptions(most_tasks_of_short=most_tasks)
    problem = Problem(GRAPH, 10 * UNIT, UNIT, None)
    assert check(plan_finepage(problem, options)).reloaded_bytes > 0


def test_a_search_in_a_smaller_arena_leaves_out_what_takes_time() -> None:
    def others(is_thorough: bool, has_forecasts: bool) -> FinepageOptions:
        return DEFAULTS.of_smaller_arenas(is_thorough=is_thorough, has_forecasts=has_forecasts)

    thorough, long = others(True, False), others(False, True)
    assert not any((thorough.tries_sets, thorough.settles, thorough.tries_exact))
    assert thorough.tries_whole and long.tries_whole
    assert thorough.recomputes and not long.recomputes
    for same in (thorough, long):
        assert (same.grained_rings, same.ring_weights) == (
            DEFAULTS.grained_rings,
            DEFAULTS.ring_weights,
        )
    slow = others(False, False)
    assert slow.grained_rings == () and len(slow.ring_weights) == 2


def test_a_search_ends_where_an_arena_is_too_small() -> None:
    problem = Problem(GRAPH, 2 * UNIT, UNIT, machine(h2d=1e6))
    options = FinepageOptions(smaller_arenas=(UNIT / 2**17, UNIT / 2**16))
    assert check(plan_finepage(problem, options)).peak_bytes == 2 * UNIT


@pytest.mark.parametrize(("again_ns", "goes_on"), [(1950, False), (1800, True)])
def test_cheap_tasks_run_again_in_smaller_arenas_if_that_is_clearly_faster(
    again_ns: int, goes_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = Problem(GRAPH, 20 * UNIT, UNIT, machine(h2d=1e15))
    again = captured.of(dataclasses.replace(GRAPH, name="again"))
    times_ns = iter([2000, again_ns])
    monkeypatch.setattr(finepage_search, "predicted_ns", lambda *_, **__: (next(times_ns), 0))
    search = _Search(captured)
    for problem in (captured, again):
        search._try_simulated(problem, lambda *_: iter([None, plans_by_units()[10]]))
    assert (search._simulated is again) == goes_on


def test_every_choice_of_tables_has_its_own_pass() -> None:
    graph = matmul_chain([8, 16], num_rows=3)
    (table,) = (b.id for b in graph.buffers if b.name == "table")
    again = dataclasses.replace(graph.tasks[0], index=len(graph.tasks))
    problem = Problem(dataclasses.replace(graph, tasks=(*graph.tasks, again)), 1024)
    rows = _with_rows(problem)
    assert rows.graph != problem.graph
    assert _with_rows(problem).graph is rows.graph
    assert _with_rows(problem, whole_tables=True).graph is problem.graph
    assert _with_rows(problem, kept={table}).graph is problem.graph


def _answer(has_room: bool, problem: Problem) -> bool:
    return has_room


def test_cheap_tasks_run_again_for_time_or_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(graph: TaskGraph, *, profile: HardwareProfile | None, **_: float) -> TaskGraph:
        asked.append(profile)
        return graph

    monkeypatch.setattr(finepage_search, "recompute", noted)
    problem = Problem(GRAPH, 10 * UNIT, UNIT, machine(h2d=1e6))
    for has_room in (True, False, True):
        search = _Search(problem)
        search.offer(Forecast(10**9, UNIT, lambda: plans_by_units()[10]))
        search.try_both_graphs(functools.partial(_answer, has_room))
    assert asked == [problem.profile, None]
