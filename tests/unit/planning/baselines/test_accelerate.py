"""Accelerate's policies: what is fetched, kept and freed when.

Against the real hooks: tests/integration/test_other_engines.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.memgraph import MemGraph, NodeKind
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning import script
from ds_finepage.planning.baselines.accelerate import (
    MapSettings,
    map_modules,
    most_modules,
    plan_accelerate_map,
)
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.script import realize
from ds_finepage.planning.simulator import simulate
from tests.unit.planning.baselines.layered import CARD, UNIT, awaited, layered, moved


def problem(graph: TaskGraph, units: int = 100) -> Problem:
    return Problem(graph, units * UNIT, UNIT)


def mapped(graph: TaskGraph, num_modules: int) -> MemGraph:
    return check(plan_accelerate_map(replace(problem(graph), engine=MapSettings(num_modules))))


def test_a_module_fetches_just_before_it_runs_and_frees_just_after() -> None:
    memgraph = mapped(layered(1), num_modules=0)
    assert moved(memgraph, NodeKind.RELOAD, NodeKind.DROP) == [
        *("reload embed", "embed", "drop embed"),
        *("reload layers.0.lin0", "layers.0.lin0", "drop layers.0.lin0"),
        *("reload layers.0.lin1", "layers.0.lin1", "drop layers.0.lin1"),
        *("reload head", "head", "drop head"),
    ]
    assert memgraph.entry == memgraph.exit == () and memgraph.offloaded_bytes == 0


def test_copies_and_tasks_take_turns_whatever_the_room() -> None:
    timeline = simulate(mapped(layered(3, task_ns=100), num_modules=0), CARD)
    assert timeline.total_ns == timeline.compute_ns + timeline.transfer_ns == 8 * 100 + 8 * UNIT


def test_a_fetch_waits_for_all_tasks_so_far() -> None:
    assert awaited(mapped(layered(1), num_modules=0)) == [
        ("embed", "layers.0.lin0"),
        ("layers.0.lin0", "layers.0.lin1"),
        ("layers.0.lin1", "head"),
    ]


def test_a_tied_weight_is_fetched_for_each_module_that_has_it() -> None:
    graph = layered(2, is_tied=True)
    memgraph = mapped(graph, num_modules=0)
    assert memgraph.reloaded_bytes == graph.weight_bytes + UNIT == 6 * UNIT


def test_a_map_module_is_a_layer_or_a_module_outside_all_layers() -> None:
    graph = layered(2)
    found = {name: len(weights) for name, weights in map_modules(graph).items()}
    assert found == {"embed": 1, "layers.0": 2, "layers.1": 2, "head": 1}


def test_the_first_modules_stay_and_the_others_are_fetched() -> None:
    memgraph = mapped(layered(2), num_modules=2)
    assert {r.buffer for r in memgraph.entry} == {0, 1, 2} == {r.buffer for r in memgraph.exit}
    assert moved(memgraph, NodeKind.RELOAD) == [
        *("embed", "layers.0.lin0", "layers.0.lin1"),
        *("reload layers.1.lin0", "layers.1.lin0", "reload layers.1.lin1", "layers.1.lin1"),
        *("reload head", "head"),
    ]


def test_a_tied_weight_stays_with_the_module_that_has_its_name() -> None:
    memgraph = mapped(layered(2, is_tied=True), num_modules=1)
    assert memgraph.reloaded_bytes == 4 * UNIT


@pytest.mark.parametrize(
    ("units", "num_modules"), [(3, 0), (4, 1), (5, 1), (6, 2), (7, 3), (8, 4), (100, 4)]
)
def test_as_many_modules_stay_as_there_is_room_for(units: int, num_modules: int) -> None:
    """A task needs a weight and two activations, the head one."""
    graph = layered(2)
    assert most_modules(problem(graph, units)) == num_modules
    memgraph = check(plan_accelerate_map(problem(graph, units)))
    kept = [w for found in list(map_modules(graph).values())[:num_modules] for w in found]
    assert [r.buffer for r in memgraph.entry] == kept


def test_modules_stay_only_if_offsets_fit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fragmented(of: Problem, found: script.Script) -> MemGraph:
        if len(found.entry) > 1:
            raise PlanInfeasibleError("a gap")
        return realize(of, found)

    monkeypatch.setattr(script, "realize", fragmented)
    assert most_modules(problem(layered(2))) == 1


def test_an_arena_without_room_for_a_module_is_refused() -> None:
    graph = layered(1, weights_a_layer=1)
    with pytest.raises(PlanInfeasibleError):
        plan_accelerate_map(problem(graph, units=2))
    with pytest.raises(PlanInfeasibleError, match="policy 'accelerate-map' holds"):
        plan_accelerate_map(replace(problem(graph, units=3), engine=MapSettings(3)))
