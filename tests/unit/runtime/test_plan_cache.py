"""A plan is checked before it runs, wherever it comes from, and a kept one is the one asked for."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finepage import api
from ds_finepage import whatif as forecast
from ds_finepage.errors import InvalidPlanError
from ds_finepage.graph.codec import save
from ds_finepage.graph.memgraph import Extent, MemGraph, NodeKind
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning import pipeline
from ds_finepage.planning.policies import plan_steady
from ds_finepage.runtime import plan_cache
from ds_finepage.runtime.passes import Pass
from ds_finepage.runtime.stats import Counters
from ds_finepage.whatif import CapturedModel
from tests.unit.planning.sketches import chain
from tests.unit.runtime.settings import PROFILE, UNIT, run_settings, sized_pass

NBYTES = 1024
GRAPH = chain(9, nbytes=NBYTES)
ARENA = 7 * NBYTES


def plan_pass(
    folder: Path | None = None,
    *,
    graph: TaskGraph = GRAPH,
    arena_bytes: int = ARENA,
    counters: Counters | None = None,
    **changes: Any,
) -> MemGraph:
    settings = run_settings(plan_dir=folder, **changes)
    found = sized_pass(graph, settings)
    return plan_cache.plan_pass(found, arena_bytes, settings, counters or Counters()).memgraph


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
    assert "cannot be used, and is replaced" in caplog.text and "rule" in caplog.text
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
    "arena": {"arena_bytes": ARENA - NBYTES},
    "alignment": {"device": torch.device("meta")},
    "policy": {"policy": "horizon"},
    "taskgraph": {"graph": chain(10, nbytes=NBYTES)},
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_plan_is_kept_for_what_was_asked_alone(what: str, tmp_path: Path) -> None:
    counters = Counters()
    first = plan_pass(tmp_path, counters=counters)
    other = plan_pass(tmp_path, counters=counters, **OTHERS[what])
    assert counters.num_plans == len(list(tmp_path.iterdir())) == 2
    asked = {"arena_bytes": ARENA, "policy": "finepage", **OTHERS[what]}
    assert other.arena_bytes == asked["arena_bytes"]
    assert other.alignment == (512 if what == "alignment" else 64)
    assert other.policy == asked["policy"]
    assert other == plan_pass(**OTHERS[what])
    plan_ns = counters.plan_ns
    assert plan_ns > 0
    # Both are found again, each for its own question.
    assert plan_pass(tmp_path, counters=counters) == first
    assert plan_pass(tmp_path, counters=counters, **OTHERS[what]) == other
    assert counters.num_plans == 2 and counters.plan_ns == plan_ns


# --- plans that leave in place what another pass keeps ---------------------------------------


def alternating(arena_bytes: int = ARENA) -> tuple[Pass, MemGraph]:
    """Make a pass of the same weights with larger activations, beside one that is planned."""
    other = sized_pass(GRAPH)
    other.set_plan(plan_cache.plan_pass(other, arena_bytes, run_settings(), Counters()))
    found = sized_pass(chain(9, nbytes=NBYTES, activation_bytes=2 * NBYTES))
    found.follow(other, may_adapt=True)
    found.follow(other, may_adapt=True)
    assert found.alternating is other and other.memgraph is not None
    return found, other.memgraph


def planned_beside(found: Pass, folder: Path | None = None) -> MemGraph:
    settings = run_settings(plan_dir=folder)
    return plan_cache.plan_pass(found, ARENA, settings, Counters()).memgraph


def test_a_pass_leaves_the_residents_of_an_alternating_pass_in_place() -> None:
    found, before = alternating()
    alone = planned_beside(sized_pass(found.graph))
    beside = planned_beside(found)
    assert found.alternating is not None
    assert beside.entry and set(beside.entry) <= set(before.entry)
    assert not set(alone.entry) <= set(before.entry)


@pytest.mark.parametrize("is_planned", (True, False))
def test_an_alternating_pass_with_another_arena_is_forgotten(is_planned: bool) -> None:
    found, _ = alternating(ARENA - NBYTES)
    assert found.alternating is not None
    if not is_planned:
        found.alternating.invalidate_plan("a test")
    assert planned_beside(found).entry
    assert found.alternating is None


def test_a_plan_that_depends_on_another_is_not_kept(tmp_path: Path) -> None:
    found, _ = alternating()
    planned_beside(found, tmp_path)
    assert list(tmp_path.iterdir()) == []
    found.forget_alternating()
    planned_beside(found, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_plans_that_cut_weights_are_not_kept(tmp_path: Path) -> None:
    plan_pass(tmp_path, split=True)
    assert list(tmp_path.iterdir()) == []


def test_the_figures_of_a_pass_are_those_of_its_arena() -> None:
    found, counters = sized_pass(GRAPH), Counters()
    planned = plan_cache.plan_pass(found, ARENA, run_settings(), counters)
    found.set_plan(planned)
    assert found.stats().arena_bytes == ARENA
    assert 0 < found.stats().lower_bound_bytes <= planned.memgraph.reloaded_bytes
    assert counters.num_plans == 1
