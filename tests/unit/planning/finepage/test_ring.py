"""The ring of streamed weights, and where activations lie beside it."""

from __future__ import annotations

import dataclasses

from ds_finepage.checker.checker import check
from ds_finepage.graph.memgraph import Extent, MemGraph
from ds_finepage.graph.taskgraph import TaskGraph, TensorView
from ds_finepage.planning.finepage.ring import Ring, place_activations, write_plan
from ds_finepage.planning.problem import Problem
from tests.unit.planning.sketches import chain, names, offsets, sketch

UNIT = 64


def gathering(graph: TaskGraph, buffer: int, by: int) -> TaskGraph:
    """Let a weight hold rows that each call chooses, by what is in another buffer."""
    buffers = list(graph.buffers)
    buffers[buffer] = dataclasses.replace(buffers[buffer], gather=0)
    indices = TensorView(0, by, "int64", (1,), (1,))
    return dataclasses.replace(graph, buffers=tuple(buffers), tensors=(indices,))


def plan(
    graph: TaskGraph,
    ring_bytes: int,
    streamed: list[int],
    residents: dict[int, Extent] | None = None,
) -> MemGraph | None:
    problem = Problem(graph, 16 * UNIT, UNIT)
    return write_plan(
        problem,
        streamed=streamed,
        activations=place_activations(problem),
        ring_bytes=ring_bytes,
        residents=residents or {},
    )


def test_extents_follow_each_other_and_begin_anew_at_the_end() -> None:
    ring = Ring(100, 10)
    assert ring.take(0, 4) == Extent(100, 4)
    assert ring.take(1, 4) == Extent(104, 4)
    assert ring.take(2, 4) is None  # would begin anew, where the first one is
    ring.give_back(0)
    assert ring.take(2, 4) == Extent(100, 4)
    assert ring.take(3, 4) is None
    ring.give_back(1)
    assert ring.take(3, 4) == Extent(104, 4)


def test_what_is_larger_than_the_ring_has_no_extent() -> None:
    assert Ring(0, 10).take(0, 11) is None
    assert Ring(0, 10).take(0, 10) == Extent(0, 10)


def test_weights_may_leave_out_of_order() -> None:
    ring = Ring(0, 12)
    for buffer in range(3):
        assert ring.take(buffer, 4) is not None
    ring.give_back(1)
    assert ring.take(3, 4) is None  # the first one still lies there
    ring.give_back(0)
    assert ring.take(3, 4) == Extent(0, 4)


def test_activations_share_bytes_where_they_do_not_live_together() -> None:
    graph = sketch("a0:64 a1:64 a2:64 w:64", "w -> a0", "a0 -> a1", "a1 -> a2", "a2 ->")
    placed = place_activations(Problem(graph, 0, UNIT))
    assert placed == {0: Extent(0, 64), 1: Extent(64, 64), 2: Extent(0, 64)}


def test_rows_of_an_embedding_have_their_bytes_from_the_start_of_the_pass() -> None:
    graph = sketch("w0:64 a0:64 a1:64 i:64", "-> a0", "a0 ->", "w0 i -> a1", "a1 ->")
    graph = gathering(graph, 0, by=3)
    placed = place_activations(Problem(graph, 0, UNIT))
    assert not placed[0].overlaps(placed[1])
    memgraph = plan(graph, 0, [])
    assert memgraph is not None
    check(memgraph)
    assert names(memgraph)[:2] == ["alloc w0", "reload w0"]


def test_a_ring_looks_as_far_ahead_as_it_is_long() -> None:
    graph = chain(4)
    for length, before_first in ((1, 1), (2, 2), (4, 4)):
        memgraph = plan(graph, length * UNIT, [0, 1, 2, 3])
        assert memgraph is not None
        check(memgraph)
        found = names(memgraph)
        ahead = found[: found.index("compute 0")]
        assert sum(name.startswith("reload") for name in ahead) == before_first
        assert {offsets(memgraph)[f"alloc w{i}"] for i in range(4)} == {
            UNIT * (1 + i % length) for i in range(4)
        }


def test_a_ring_that_is_too_small_for_a_task_is_no_plan() -> None:
    graph = sketch("w0:64 w1:64 a:64", "w0 w1 -> a", "a ->")
    assert plan(graph, UNIT, [0, 1]) is None
    assert plan(graph, 2 * UNIT, [0, 1]) is not None


def test_residents_in_the_ring_are_no_plan() -> None:
    graph = chain(2)
    assert plan(graph, UNIT, [0], {1: Extent(UNIT, UNIT)}) is None
    assert plan(graph, UNIT, [0], {1: Extent(2 * UNIT, UNIT)}) is not None
