"""Clones of tasks: who uses what was made again, and what is left out."""

from __future__ import annotations

from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.rewrite.clones import Clone, insert_clones
from tests.property.value_interpreter import values_at_end
from tests.unit.planning.sketches import sketch

GRAPH = sketch(
    "i0:64 aRows:64 aWide:64 aX:64 aY:64 oOut:64",
    "i0 -> aRows",
    "aRows -> aWide",
    "aWide -> aX",
    "aX -> aY",
    "aWide aY -> oOut",
    "aRows oOut -> oOut",
)


def texts(graph: TaskGraph) -> list[str]:
    """Write tasks down by numbers of buffers."""
    return [f"{' '.join(map(str, t.reads))} -> {' '.join(map(str, t.writes))}" for t in graph.tasks]


def test_no_clone_is_the_same_graph() -> None:
    assert insert_clones(GRAPH, []) is GRAPH


def test_later_tasks_use_the_clone() -> None:
    found = insert_clones(GRAPH, [Clone(2, 4, (1,))])
    assert texts(found) == [
        "0 -> 1",
        "1 -> 2",
        "2 -> 3",
        "3 -> 4",
        "1 -> 6",
        "4 6 -> 5",
        "1 5 -> 5",
    ]
    assert [t.index for t in found.tasks] == list(range(7))
    assert found.buffers[6].kind is BufferKind.ACTIVATION
    assert values_at_end(found) == values_at_end(GRAPH)


def test_what_is_made_on_the_way_is_for_the_clone_alone() -> None:
    """A later task uses the rows that were there before: the others are gone by then."""
    found = insert_clones(GRAPH, [Clone(2, 4, (0, 1))])
    assert texts(found) == [
        *("0 -> 1", "1 -> 2", "2 -> 3", "3 -> 4"),
        *("0 -> 6", "6 -> 7", "4 7 -> 5", "1 5 -> 5"),
    ]
    assert values_at_end(found) == values_at_end(GRAPH)


def test_a_task_whose_result_nobody_uses_any_more_is_left_out() -> None:
    graph = sketch("i0:64 aMask:64 aX:64 oOut:64", "i0 -> aMask", "i0 -> aX", "aMask aX -> oOut")
    found = insert_clones(graph, [Clone(1, 2, (0,))])
    assert texts(found) == ["0 -> 2", "0 -> 4", "2 4 -> 3"]
    assert values_at_end(found) == values_at_end(graph)
