"""Policy static: shares, one layer ahead."""

from __future__ import annotations

import dataclasses

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.memgraph import MemGraph, NodeKind
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.baselines.static import FORMS, largest, plan_static, script_of
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.script import realize
from ds_finepage.planning.simulator import simulate
from tests.unit.planning.baselines.layered import CARD, UNIT, layered, moved
from tests.unit.planning.sketches import sketch


def row(graph: TaskGraph, units: int) -> MemGraph:
    found = plan_static(Problem(graph, arena_bytes=units * UNIT, alignment=UNIT, profile=CARD))
    return check(found)


def resized(graph: TaskGraph, **units: int) -> TaskGraph:
    """Change the size of all buffers of a kind."""
    buffers = tuple(
        dataclasses.replace(b, nbytes=units.get(b.kind.value, 1) * UNIT) for b in graph.buffers
    )
    return dataclasses.replace(graph, buffers=buffers)


def in_first_form(graph: TaskGraph, units: int) -> MemGraph:
    """Plan the largest share, in the first form."""
    problem = Problem(graph, arena_bytes=units * UNIT, alignment=UNIT, profile=CARD)
    found = largest(problem, FORMS[0])
    assert found is not None
    return check(found)


def test_a_layer_is_brought_in_while_the_one_before_computes() -> None:
    """And the first one while the last does."""
    problem = Problem(layered(2), arena_bytes=6 * UNIT, alignment=UNIT, profile=CARD)
    streamed = check(realize(problem, script_of(problem.graph, 0)))
    assert moved(streamed, NodeKind.RELOAD, NodeKind.DROP) == [
        *("reload layers.0.lin0", "reload layers.0.lin1", "embed", "drop embed"),
        *("reload layers.1.lin0", "reload layers.1.lin1", "layers.0.lin0", "layers.0.lin1"),
        *("drop layers.0.lin0", "drop layers.0.lin1"),
        *("reload head", "layers.1.lin0", "layers.1.lin1"),
        *("drop layers.1.lin0", "drop layers.1.lin1"),
        *("reload embed", "head", "drop head"),
    ]


def test_never_more_than_one_layer_ahead() -> None:
    """However fast the link: the copies for layer i + 1 wait for layer i - 1."""
    fast = dataclasses.replace(CARD, h2d_bytes_per_s=1e15)
    memgraph = row(layered(6, task_ns=1000), 6)
    spans = {s.name: s for s in simulate(memgraph, fast).spans}
    for i in range(4):
        reload = spans[f"reload layers.{i + 2}.lin0.weight"]
        assert reload.start_ns >= spans[f"task {2 + 2 * i} test.linear (layers.{i}.lin1)"].end_ns


@pytest.mark.parametrize("units", range(6, 21))
def test_more_room_keeps_more(units: int) -> None:
    graph = layered(7, weights_a_layer=2)
    memgraph = row(graph, units)
    assert memgraph.entry == memgraph.exit
    assert memgraph.offloaded_bytes == 0
    assert memgraph.reloaded_bytes >= row(graph, units + 1).reloaded_bytes
    # Two layers and two activations are beside the share that is kept.
    assert memgraph.reloaded_bytes <= max(0, 16 - (units - 6) + 3) * UNIT


def test_the_last_weights_of_a_layer_are_kept() -> None:
    memgraph = in_first_form(layered(7), 11)
    assert [n for n in moved(memgraph, NodeKind.RELOAD) if n.startswith("reload")] == [
        *(f"reload layers.{i}.lin0" for i in range(7)),
        *("reload head", "reload embed"),
    ]


@pytest.mark.parametrize("units", range(9, 16))
def test_the_fastest_form_is_taken(units: int) -> None:
    graph = resized(layered(5, weights_a_layer=3, task_ns=1), weight=2)
    searched, first = (simulate(find(graph, units * 2), CARD) for find in (row, in_first_form))
    assert searched.total_ns <= first.total_ns
    if units == 14:
        assert searched.total_ns < first.total_ns


def test_all_that_fits_is_kept() -> None:
    assert row(layered(3), 10).reloaded_bytes == 0
    assert row(layered(3), 9).reloaded_bytes > 0


def test_a_tied_weight_is_brought_in_for_both_its_layers() -> None:
    memgraph = row(layered(4, is_tied=True), 6)
    reloaded = [n.buffer for n in memgraph.nodes if n.kind is NodeKind.RELOAD]
    assert memgraph.entry == memgraph.exit
    assert set(reloaded) == set(range(9))


def test_less_than_two_layers_is_refused() -> None:
    row(layered(3, weights_a_layer=4), 10)
    with pytest.raises(PlanInfeasibleError) as caught:
        row(layered(3, weights_a_layer=4), 9)
    assert "policy 'static' holds" in str(caught.value) and "(640 bytes)" in str(caught.value)


def test_a_model_without_layers_is_brought_in_as_its_labels_change() -> None:
    graph = sketch("w0:64 w1:64 w2:64 w3:64 a:64", "w0 -> a", "w1 a -> a", "w2 a -> a", "w3 a -> a")
    memgraph = row(graph, 3)
    assert memgraph.reloaded_bytes == 4 * UNIT
    assert memgraph.peak_bytes == 3 * UNIT
