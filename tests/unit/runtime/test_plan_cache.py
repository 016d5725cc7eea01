"""A plan is checked before it runs, wherever it comes from, and a kept one is the one asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ds_finepage import api
from ds_finepage import whatif as forecast
from ds_finepage.errors import InvalidPlanError
from ds_finepage.graph.codec import save
from ds_finepage.graph.memgraph import Extent, MemGraph, NodeKind
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning import pipeline
from ds_finepage.planning.policies import plan_steady
from ds_finepage.runtime import plan_cache as plans
from ds_finepage.runtime.pass_table import Pass
from ds_finepage.runtime.stats import PassStats, Stats
from ds_finepage.whatif import CapturedModel
from tests.unit.planning.finepage.test_search import machine
from tests.unit.planning.sketches import chain

UNIT = 64
GRAPH = chain(9, nbytes=128)
ARENA = 7 * 2 * UNIT
PROFILE = machine(h2d=1e9)


def plan_pass(
    folder: Path | None = None,
    *,
    graph: TaskGraph = GRAPH,
    arena_bytes: int = ARENA,
    policy: str = "finepage",
    alignment: int = UNIT,
    split: bool = False,
    stats: Stats | None = None,
) -> MemGraph:
    return plans.plan_pass(
        Pass(graph, PassStats(graph.name, len(graph.tasks), 0, 0, 0, 0)),
        arena_bytes,
        stats=stats or Stats(arena_bytes, 0),
        policy=policy,
        split=split,
        alignment=alignment,
        profile=PROFILE,
        plan_dir=folder,
    )


def spoiled(memgraph: MemGraph) -> MemGraph:
    """Let a weight come in over whatever lies at the start of the arena."""
    at = next(n.id for n in memgraph.nodes if n.kind is NodeKind.ALLOC and n.extent.offset)
    nodes = list(memgraph.nodes)
    nodes[at] = dataclasses.replace(nodes[at], extent=Extent(0, nodes[at].extent.nbytes))
    return dataclasses.replace(memgraph, nodes=tuple(nodes))


def spoiled_plan(*args: Any, **kwargs: Any) -> MemGraph:
    return spoiled(plan_steady(*args, **kwargs))


# --- every plan is checked -------------------------------------------------------------------


def test_a_new_plan_is_checked_before_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_pass()
    monkeypatch.setattr(pipeline, "plan_steady", spoiled_plan)
    with pytest.raises(InvalidPlanError, match="breaks .* rule"):
        plan_pass()


def test_a_plan_from_a_file_is_checked_and_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right = plan_pass(tmp_path)
    (path,) = tmp_path.iterdir()
    kept = path.read_bytes()
    save(spoiled(right), path)
    assert plan_pass(tmp_path) == right
    assert "cannot be used, and is made anew" in caplog.text and "rule" in caplog.text
    assert path.read_bytes() == kept


def test_a_plan_made_by_hand_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    api.plan(GRAPH, arena_bytes=ARENA, alignment=UNIT, profile=PROFILE)
    monkeypatch.setattr(pipeline, "plan_steady", spoiled_plan)
    with pytest.raises(InvalidPlanError, match="breaks .* rule"):
        api.plan(GRAPH, arena_bytes=ARENA, alignment=UNIT, profile=PROFILE)


def test_a_forecast_is_that_of_a_checked_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(9, nbytes=512)
    captured = CapturedModel(
        model="chain", phase="decode", batch=1, seq=1, graph=graph, capture_seconds=0
    )
    budget = captured.needs.non_arena_bytes + 6 * 512
    forecast.plan_captured(captured, budget_bytes=budget, profile=PROFILE)
    monkeypatch.setattr(pipeline, "plan_steady", spoiled_plan)
    with pytest.raises(InvalidPlanError, match="breaks .* rule"):
        forecast.plan_captured(captured, budget_bytes=budget, profile=PROFILE)


# --- plans that are kept in a folder ---------------------------------------------------------

OTHERS: dict[str, dict[str, Any]] = {
    "arena": {"arena_bytes": ARENA - 2 * UNIT},
    "alignment": {"alignment": 2 * UNIT},
    "policy": {"policy": "horizon"},
    "taskgraph": {"graph": chain(10, nbytes=128)},
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_plan_is_kept_for_what_was_asked_alone(what: str, tmp_path: Path) -> None:
    stats = Stats(ARENA, 0)
    first = plan_pass(tmp_path, stats=stats)
    other = plan_pass(tmp_path, stats=stats, **OTHERS[what])
    assert stats.num_plans == len(list(tmp_path.iterdir())) == 2
    asked = {"arena_bytes": ARENA, "alignment": UNIT, "policy": "finepage", **OTHERS[what]}
    assert other.arena_bytes == asked["arena_bytes"]
    assert other.alignment == asked["alignment"]
    assert other.policy == asked["policy"]
    assert other == plan_pass(**OTHERS[what])
    # Both are found again, each for its own question.
    assert plan_pass(tmp_path, stats=stats) == first
    assert plan_pass(tmp_path, stats=stats, **OTHERS[what]) == other
    assert stats.num_plans == 2


# --- plans that leave in place what another pass keeps ---------------------------------------


def with_neighbour(arena_bytes: int = ARENA) -> tuple[Pass, MemGraph]:
    """Make a pass of the same weights with larger activations, beside one that is planned."""
    before = plan_pass(arena_bytes=arena_bytes)
    neighbour = Pass(GRAPH, PassStats("neighbour", 9, 0, 0, 0, 0), memgraph=before)
    other = chain(9, nbytes=128, activation_bytes=256)
    return Pass(other, PassStats("pass", 9, 0, 0, 0, 0), neighbour=neighbour), before


def planned_beside(found: Pass, folder: Path | None = None) -> MemGraph:
    return plans.plan_pass(
        found,
        ARENA,
        stats=Stats(ARENA, 0),
        policy="finepage",
        split=False,
        alignment=UNIT,
        profile=PROFILE,
        plan_dir=folder,
    )


def test_a_pass_leaves_in_place_what_its_neighbour_keeps() -> None:
    found, before = with_neighbour()
    alone = plans.plan_pass(
        Pass(found.graph, PassStats("pass", 9, 0, 0, 0, 0)),
        ARENA,
        stats=Stats(ARENA, 0),
        policy="finepage",
        split=False,
        alignment=UNIT,
        profile=PROFILE,
        plan_dir=None,
    )
    beside = planned_beside(found)
    assert found.neighbour is not None
    assert beside.entry and set(beside.entry) <= set(before.entry)
    assert not set(alone.entry) <= set(before.entry)


@pytest.mark.parametrize("is_planned", (True, False))
def test_a_neighbour_with_another_arena_is_forgotten(is_planned: bool) -> None:
    found, _ = with_neighbour(ARENA - 2 * UNIT)
    assert found.neighbour is not None
    if not is_planned:
        found.neighbour.memgraph = None
    assert planned_beside(found).entry
    assert found.neighbour is None


def test_a_plan_that_depends_on_another_is_not_kept(tmp_path: Path) -> None:
    found, _ = with_neighbour()
    planned_beside(found, tmp_path)
    assert list(tmp_path.iterdir()) == []
    found.neighbour = None
    planned_beside(found, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_plans_that_cut_weights_are_not_kept(tmp_path: Path) -> None:
    plan_pass(tmp_path, split=True)
    assert list(tmp_path.iterdir()) == []


def test_the_figures_of_a_pass_are_those_of_its_arena() -> None:
    found = Pass(GRAPH, PassStats("chain", 9, 0, 0, 0, 0))
    stats = Stats(ARENA, 0)
    memgraph = plans.plan_pass(
        found,
        ARENA,
        stats=stats,
        policy="finepage",
        split=False,
        alignment=UNIT,
        profile=PROFILE,
        plan_dir=None,
    )
    assert found.stats.arena_bytes == ARENA
    assert 0 < found.stats.lower_bound_bytes <= memgraph.reloaded_bytes
    assert stats.num_plans == 1
