"""The one road from graph to checked plan, and the bytes that a pass needs."""

from __future__ import annotations

import dataclasses
import gc
from functools import partial

import pytest

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.planning import pipeline
from ds_finepage.planning.bounds import lower_bound, lower_bound_bytes
from ds_finepage.planning.budget import non_arena_bytes
from ds_finepage.planning.finepage.search import min_split_arena_bytes
from ds_finepage.planning.liveness import min_arena_bytes, needed_arena_bytes
from ds_finepage.planning.pipeline import PlanSettings, graph_to_plan, needs_of, plan_checked
from ds_finepage.planning.rewrite.embeddings import gather_rows
from ds_finepage.planning.simulator import simulate
from tests.property.matmul_chains import matmul_chain
from tests.unit.planning.finepage.test_search import machine
from tests.unit.planning.sketches import chain

UNIT = 64
PROFILE = machine(h2d=1e9)
TABLE = matmul_chain([16, 64, 16], num_rows=2, vocabulary=256)
SETTINGS = PlanSettings(policy="finepage", split=False, alignment=UNIT, profile=PROFILE)
SPLIT = dataclasses.replace(SETTINGS, split=True)


@pytest.mark.parametrize(
    ("policy", "split", "cuts"),
    [("finepage", True, True), ("finepage", False, False), ("horizon", True, False)],
)
def test_weights_are_cut_if_the_settings_and_the_policy_can(
    policy: str, split: bool, cuts: bool
) -> None:
    settings = dataclasses.replace(SETTINGS, policy=policy, split=split)
    assert settings.cuts_weights is cuts
    least = min_arena_bytes(TABLE, UNIT) - UNIT
    assert (graph_to_plan(TABLE, least, settings) is TABLE) is cuts


def test_a_timeline_is_computed_once_and_only_if_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    planned = plan_checked(chain(9), 5 * UNIT, SETTINGS)
    monkeypatch.setattr(pipeline, "simulate", lambda *a, **k: calls.append(a) or simulate(*a, **k))
    assert calls == [] and planned.memgraph.arena_bytes == 5 * UNIT
    assert planned.timeline is planned.timeline == simulate(planned.memgraph, PROFILE)
    assert len(calls) == 1


def test_the_lower_bound_is_that_of_the_graph_that_the_policy_gets() -> None:
    arena_bytes = needed_arena_bytes(TABLE, UNIT) - UNIT
    whole = plan_checked(TABLE, arena_bytes, SETTINGS)
    assert whole.lower_bound_bytes == lower_bound_bytes(gather_rows(TABLE), arena_bytes, UNIT)
    cut = plan_checked(TABLE, arena_bytes, SPLIT)
    assert cut.lower_bound_bytes == lower_bound_bytes(TABLE, arena_bytes, UNIT, may_cut=True)
    assert whole.lower_bound_bytes != lower_bound_bytes(TABLE, arena_bytes, UNIT)


def test_a_printed_bound_counts_for_each_task_its_own_workspace() -> None:
    """Another schedule could use the rest of the largest one, under the same budget."""
    table, *others = TABLE.tasks
    wide = dataclasses.replace(table, workspace_bytes=640)
    graph = dataclasses.replace(TABLE, tasks=(wide, *others))
    for settings in (SETTINGS, SPLIT):
        bound_of = partial(lower_bound, may_cut=settings.split)
        arena_bytes = 6144  # the two products need 8192 bytes and their activations
        planned = plan_checked(graph, arena_bytes, settings)
        policy_gets = graph_to_plan(graph, arena_bytes, settings)
        own = bound_of(policy_gets, arena_bytes, UNIT, own_workspaces=True)
        less = bound_of(policy_gets, arena_bytes, UNIT)
        assert planned.lower_bound_bytes == own.nbytes < less.nbytes


def test_weights_that_a_pass_finds_and_does_not_leave_are_copied_in_every_pass() -> None:
    horizon = dataclasses.replace(SETTINGS, policy="horizon")
    restless = [plan_checked(chain(9), units * UNIT, horizon) for units in range(2, 11)]
    restless = [p for p in restless if p.memgraph.lost]
    assert restless
    for planned in restless:
        without = simulate(planned.memgraph, PROFILE)
        assert planned.timeline.transfer_ns > without.transfer_ns


def test_needs_count_looked_up_rows_cut_weights_and_libraries() -> None:
    rows = gather_rows(TABLE)
    whole = needs_of(TABLE, alignment=UNIT, cuts_weights=False, looks_up_rows=False)
    assert whole.non_arena_bytes == non_arena_bytes(TABLE, UNIT)
    assert whole.min_arena_bytes == min_arena_bytes(TABLE, UNIT)
    needs = needs_of(TABLE, alignment=UNIT, cuts_weights=False, library_bytes=1000)
    assert needs.non_arena_bytes == non_arena_bytes(rows, UNIT) + 1000
    assert needs.min_arena_bytes == min_arena_bytes(rows, UNIT) < whole.min_arena_bytes
    assert needs.needed_arena_bytes == needed_arena_bytes(TABLE, UNIT)
    assert needs.min_budget_bytes == needs.non_arena_bytes + needs.min_arena_bytes
    assert needs.needed_budget_bytes == needs.non_arena_bytes + needs.needed_arena_bytes
    cut = needs_of(TABLE, alignment=UNIT, cuts_weights=True)
    assert cut.min_arena_bytes == min_split_arena_bytes(TABLE, UNIT) < needs.min_arena_bytes


@pytest.mark.parametrize("cuts_weights", (False, True))
def test_a_budget_is_refused_just_below_the_least_one(cuts_weights: bool) -> None:
    needs = needs_of(TABLE, alignment=UNIT, cuts_weights=cuts_weights)
    needs = dataclasses.replace(needs, non_arena_bytes=needs.non_arena_bytes + 128)
    least = needs.min_budget_bytes
    needs.require_room(least)
    with pytest.raises(PlanInfeasibleError) as caught:
        needs.require_room(least - 1)
    assert caught.value.min_budget_bytes == least
    assert f"device_budget is {least - 1} bytes" in str(caught.value)
    assert ("cut into pieces" in str(caught.value)) is cuts_weights


def test_the_collector_rests_while_a_pass_is_planned_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = PlanSettings(policy="finepage", split=False, alignment=64, profile=machine(h2d=1e9))
    seen = []
    planner = pipeline.check
    monkeypatch.setattr(
        pipeline, "check", lambda plan: (seen.append(gc.isenabled()), planner(plan))[1]
    )
    plan_checked(chain(4), 64 * 5, settings)
    assert seen == [False] and gc.isenabled()
    with pytest.raises(PlanInfeasibleError):
        plan_checked(chain(4), 64, settings)
    assert gc.isenabled()
    gc.disable()
    try:
        plan_checked(chain(4), 64 * 5, settings)
        assert not gc.isenabled()
    finally:
        gc.enable()
