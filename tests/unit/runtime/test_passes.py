"""The states of a pass, and who may change them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ds_finepage.execution.executor import PassCounters
from ds_finepage.planning.pipeline import plan_checked
from ds_finepage.runtime.passes import MOST_PLANS, Pass
from tests.unit.planning.sketches import chain
from tests.unit.runtime.settings import planned_pass, run_settings, sized_pass

NBYTES = 1024
ARENA = 7 * NBYTES


def bound_pass() -> Pass:
    found, executor = planned_pass(), object()
    like_an_executor: Any = executor
    found.bind(like_an_executor)
    return found


def test_a_pass_is_sized_then_planned_then_bound() -> None:
    found = sized_pass(chain(9, nbytes=NBYTES))
    assert found.memgraph is None and found.executor is None
    assert planned_pass().memgraph is not None and planned_pass().executor is None
    assert bound_pass().executor is not None
    nothing: Any = object()
    with pytest.raises(AssertionError):
        found.bind(nothing)


def test_a_pass_loses_its_executor_before_its_plan() -> None:
    found = bound_pass()
    found.unbind()
    assert found.executor is None and found.memgraph is not None
    found = bound_pass()
    found.set_plan(plan_checked(found.graph, ARENA, run_settings().planning))
    assert found.executor is None and found.memgraph is not None
    found = bound_pass()
    found.invalidate_plan("a test")
    assert found.executor is None and found.memgraph is None
    assert found.stats().arena_bytes == ARENA  # of its last plan


def test_a_pass_keeps_a_few_plans_each_for_about_its_arena() -> None:
    found, planning = sized_pass(chain(9, nbytes=NBYTES)), run_settings().planning
    for arena_bytes in (ARENA, ARENA - NBYTES, ARENA - 2 * NBYTES):
        found.set_plan(plan_checked(found.graph, arena_bytes, planning))
    assert found.take_plan_for(ARENA + 64) and found.memgraph is not None
    assert found.memgraph.arena_bytes == found.stats().arena_bytes == ARENA
    graph = replace(found.graph, name="costs")
    found.set_costs(graph)
    assert not found.take_plan_for(ARENA - 64)  # a larger one does not fit, a smaller is too small
    assert not found.take_plan_for(ARENA * 5 // 4)
    assert found.take_plan_for(ARENA) and found.memgraph.graph is graph
    for number in range(1, MOST_PLANS):
        found.set_plan(plan_checked(found.graph, ARENA + number * NBYTES, planning))
    assert not found.take_plan_for(ARENA - NBYTES)
    found.set_plan(plan_checked(found.graph, found.needs.needed_arena_bytes, planning))
    assert found.take_plan_for(1 << 30)  # more has no use for it
    found.invalidate_plan("a test")
    assert not found.take_plan_for(1 << 30)


def test_more_workspace_of_rewritten_tasks_counts_once() -> None:
    found = bound_pass()
    before = found.needs.non_arena_bytes
    more = found.graph.workspace_bytes + 100
    assert found.count_rewritten_workspace(more)
    assert found.memgraph is None
    assert not found.count_rewritten_workspace(more)
    assert found.needs.non_arena_bytes == before + 100


def test_a_pass_alternates_where_most_runs_followed_another_pass() -> None:
    found, other = sized_pass(chain(1)), planned_pass()
    for follows, is_alternating in ((True, True), (False, False), (True, True), (False, False)):
        found.follow(other if follows else found, may_adapt=False)
        found.count_run(PassCounters())
        assert found.habit.is_alternating == is_alternating


def test_a_pass_adapts_once_in_an_arena() -> None:
    found, other, smaller = bound_pass(), planned_pass(), planned_pass()
    found.follow(None, may_adapt=True)
    found.follow(other, may_adapt=True)
    found.set_plan(plan_checked(found.graph, ARENA, run_settings().planning))
    assert smaller.memgraph is not None
    smaller.memgraph = replace(smaller.memgraph, arena_bytes=ARENA - 1)  # the arena has shrunk
    found.follow(smaller, may_adapt=True)
    assert found.alternating is smaller and found.memgraph is None


@pytest.mark.parametrize(
    "why_not",
    ("may not adapt", "no weights", "other has no plan", "other keeps nothing", "other alternates"),
)
def test_a_pass_adapts_to_the_pass_that_it_keeps_following(why_not: str) -> None:
    found, other = bound_pass(), planned_pass()
    found.follow(None, may_adapt=True)
    assert found.alternating is None and found.memgraph is not None
    found.follow(other, may_adapt=True)
    assert found.alternating is other and found.memgraph is None
    found.set_plan(plan_checked(found.graph, ARENA, run_settings().planning))
    found.follow(planned_pass(), may_adapt=True)  # a step of another length, say
    assert found.alternating is other and found.memgraph is not None

    found, other = bound_pass(), planned_pass()
    found.follow(None, may_adapt=True)
    if why_not == "no weights":
        vars(found.graph)["weight_bytes"] = 0
    if why_not == "other has no plan":
        other.invalidate_plan("a test")
    if why_not == "other keeps nothing":
        assert other.memgraph is not None
        other.memgraph = replace(other.memgraph, entry=())
    if why_not == "other alternates":
        other.follow(None, may_adapt=True)
        other.follow(found, may_adapt=True)
        other.set_plan(plan_checked(other.graph, ARENA, run_settings().planning))
    found.follow(other, may_adapt=why_not != "may not adapt")
    assert found.alternating is None and found.memgraph is not None


def test_a_snapshot_does_not_change() -> None:
    found = planned_pass()
    before = found.stats()
    found.count_run(PassCounters(3, 2, 1))
    now = found.stats()
    assert (before.num_runs, now.num_runs) == (0, 1)
    assert (now.last_reloaded_bytes, now.last_entry_reloaded_bytes) == (3, 2)
    assert now.last_offloaded_bytes == 1
    with pytest.raises(AttributeError):
        now.num_runs = 7  # type: ignore[misc]
