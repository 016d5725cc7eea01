"""How long activations stay that are copied to host memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TO_HOST, BufferKind, TaskGraph
from ds_finepage.planning.bounds import lower_bound
from ds_finepage.planning.finepage import best_plans, search
from ds_finepage.planning.finepage.forecast import Forecast
from ds_finepage.planning.finepage.held_rows import Held, copies_to_host, ways_to_hold
from ds_finepage.planning.finepage.ring import place_activations
from ds_finepage.planning.finepage.search import plan_finepage
from ds_finepage.planning.finepage.streaming import streaming_plans
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.simulator import predicted_ns, simulate
from ds_finepage.planning.time_bound import least_time_ns
from tests.integration.parity import only_cut_plans
from tests.unit.planning.sketches import sketch
from tests.unit.planning.test_simulator import PLAIN

UNIT = 64
TASK_NS = 100


def copying(buffers: str, *tasks: str) -> TaskGraph:
    """Build a taskgraph in which the tasks that write host memory copy, and others take a time."""
    graph = sketch(buffers, *tasks)
    is_host = [b.kind is BufferKind.HOST for b in graph.buffers]
    timed = (
        replace(t, op=TO_HOST) if any(is_host[b] for b in t.writes) else replace(t, time_ns=TASK_NS)
        for t in graph.tasks
    )
    return replace(graph, tasks=tuple(timed))


def rows(*, num_units: int = 5, copy_ns: int = 250) -> Problem:
    """Return a pass whose first task makes rows that the second one copies to host memory."""
    graph = copying(
        "a0:64 h:64 a1:64 a2:64 a3:64", "-> a0", "a0 -> h", "-> a1", "a1 -> a2", "a2 -> a3", "a3 ->"
    )
    machine = replace(PLAIN, d2h_bytes_per_s=UNIT * 1e9 / copy_ns)
    return Problem(graph, num_units * UNIT, UNIT, machine)


def named(problem: Problem, held: Held) -> dict[str, int]:
    """Return what is held until which task."""
    return {problem.graph.buffers[b].name: task for b, task in held.items()}


@pytest.mark.parametrize(("copy_ns", "end"), [(250, 4), (90, 2)])  # it ends at 350, and at 190
def test_rows_stay_until_their_copy_is_done(copy_ns: int, end: int) -> None:
    problem = rows(copy_ns=copy_ns)
    first, *_ = ways_to_hold(problem)
    assert named(problem, first) == {"a0": end}


def test_rows_whose_copy_takes_longer_than_the_pass_stay_to_its_end() -> None:
    problem = rows(copy_ns=5000)
    first, *_ = ways_to_hold(problem)
    assert named(problem, first) == {"a0": 5}
    planned(problem)


def test_activations_are_placed_for_each_choice_of_held_rows() -> None:
    problem = rows()
    held, nothing = ways_to_hold(problem)
    alone, beside = place_activations(problem, nothing), place_activations(problem, held)
    assert alone != beside


def test_copies_follow_one_another_on_their_link() -> None:
    graph = copying(
        "a0:64 a1:64 h0:64 h1:64 a2:64 a3:64 a4:64",
        "-> a0 a1",
        "a0 -> h0",
        "a1 -> h1",
        "-> a2",
        "a2 -> a3",
        "a3 -> a4",
        "a4 ->",
    )
    problem = Problem(graph, 8 * UNIT, UNIT, replace(PLAIN, d2h_bytes_per_s=UNIT * 1e9 / 150))
    until_done, nothing = ways_to_hold(problem)
    assert named(problem, until_done) == {"a0": 4, "a1": 5}  # at 250 and 400
    assert not nothing


def test_nothing_is_held_without_copies_or_without_a_machine() -> None:
    problem = rows()
    assert copies_to_host(problem.graph)
    tasks = tuple(replace(t, op="op") for t in problem.graph.tasks)
    other = problem.of(replace(problem.graph, tasks=tasks))
    assert not copies_to_host(other.graph)
    for without in (other, replace(problem, profile=None)):
        assert list(ways_to_hold(without)) == [{}]


def planned(problem: Problem, *, holds: bool = True) -> tuple[MemGraph, int]:
    """Return the first plan that reloads nothing, or the last one, which holds none; its time."""
    *_, nothing = ways = list(ways_to_hold(problem))
    found = streaming_plans(problem, may_split=False, held=ways[0] if holds else nothing)
    plan = next(p for p in found if p is not None)
    assert isinstance(plan, Forecast)
    assert plan.plan.reloaded_bytes == 0
    return check(plan.plan), time_of(plan.plan, problem)


def time_of(plan: MemGraph, problem: Problem) -> int:
    assert problem.profile is not None
    return predicted_ns(plan, problem.profile)


def test_no_task_waits_for_a_copy_where_there_is_room() -> None:
    held, held_ns = planned(rows())
    _, plain_ns = planned(rows(), holds=False)
    assert (held_ns, plain_ns) == (5 * TASK_NS, 5 * TASK_NS + 250)


def test_without_room_tasks_wait() -> None:
    problem = rows(num_units=2)
    assert time_of(check(plan_finepage(problem)), problem) > 5 * TASK_NS


@pytest.mark.parametrize("split", [False, True])
def test_weights_stream_where_their_room_holds_rows(split: bool) -> None:
    graph = copying(
        "w0:64 w1:64 a0:64 h:64 a1:64 a2:64 a3:64",
        "-> a0",
        "a0 -> h",
        "-> a1",
        "a1 -> a2",
        "w0 a2 -> a3",
        "w1 a3 ->",
    )
    problem = replace(rows(num_units=4), graph=graph, split=split)
    _, resident_ns = planned(problem, holds=False)
    with only_cut_plans():
        plan = check(plan_finepage(problem))
    assert plan.reloaded_bytes > 0
    assert time_of(plan, problem) < resident_ns == 5 * TASK_NS + 250


@pytest.mark.parametrize(
    ("good_enough", "copy_ns", "ends"), [(0.0, 250, [4, 0]), (0.0, 8000, [5, 0]), (1.02, 8000, [5])]
)
def test_a_search_tries_what_to_hold_until_a_plan_is_good(
    good_enough: float, copy_ns: int, ends: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def noted(*args: Any, held: Held, **others: Any) -> Any:
        tried.append(max(held.values(), default=0))
        return streaming_plans(*args, held=held, **others)

    monkeypatch.setattr(search, "streaming_plans", noted)
    monkeypatch.setattr(search, "recompute", lambda graph, **_: graph)
    monkeypatch.setattr(best_plans, "GOOD_ENOUGH", good_enough)
    plan_finepage(rows(copy_ns=copy_ns))
    assert tried == ends


def test_no_plan_is_faster_than_the_bound_where_the_host_is_slow() -> None:
    problem = rows()
    assert problem.profile is not None
    machine = replace(problem.profile, host_op_ns=1000, host_copy_ns=10)
    plan, total_ns = planned(replace(problem, profile=machine))
    bound = lower_bound(plan.graph, problem.arena_bytes, UNIT, may_cut=False)
    assert least_time_ns(bound, machine, problem.arena_bytes) == total_ns == 6000 + TASK_NS


def test_a_copy_to_host_memory_runs_beside_the_next_task() -> None:
    plan, _ = planned(rows())
    problem = rows()
    assert problem.profile is not None
    spans = {
        s.name: (s.lane.value, s.start_ns, s.end_ns) for s in simulate(plan, problem.profile).spans
    }
    (copy,) = (span for name, span in spans.items() if "layer1" in name)
    assert copy == ("d2h", 100, 350)
