"""Weights of which a pass uses a part: which they are, and what tells the part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import BufferKind, Ref, Task, TaskGraph
from tests.property.experts import PRODUCT, layers_of_experts

GRAPH = layers_of_experts(num_layers=1)
UP, DOWN = (b.id for b in GRAPH.buffers if b.name in ("0.up", "0.down"))
ENDS = next(t for t in GRAPH.tensors if t.dtype == "int32")


def with_task(graph: TaskGraph, index: int, **changes: Any) -> TaskGraph:
    tasks = list(graph.tasks)
    tasks[index] = replace(tasks[index], **changes)
    return replace(graph, tasks=tuple(tasks))


def looking_up(dtype: str = "int64", rows: int = 2) -> TaskGraph:
    """A pass in which the experts' matrices are looked up by their numbers."""
    tensors = list(GRAPH.tensors)
    tensors[ENDS.id] = replace(ENDS, dtype=dtype, shape=(rows,))
    graph = replace(GRAPH, tensors=tuple(tensors))
    rows_of, weight, ends = graph.tasks[2].args
    return with_task(graph, 2, op="aten.index.Tensor", args=(weight, (ends,)))


def test_experts_are_routed() -> None:
    found = routes(GRAPH)
    assert set(found) == {UP, DOWN}
    assert [found[b].task for b in (UP, DOWN)] == [2, 3]
    for route in found.values():
        assert (route.tensor, route.source, route.is_ends) == (ENDS.id, 1, True)
        assert (route.num_slices, route.most_used) == (8, 2)
        assert route.most_bytes(GRAPH.buffers[route.buffer].nbytes) == 2 * 64 * 64 * 4


def test_the_ends_may_be_named() -> None:
    rows, weight, ends = GRAPH.tasks[2].args
    named = with_task(GRAPH, 2, args=(rows, weight), kwargs=(("offs", ends),))
    assert routes(named) == routes(GRAPH)


def test_matrices_may_be_looked_up_by_number() -> None:
    found = routes(looking_up())
    assert not found[UP].is_ends
    assert found[UP].most_used == 2


def given_from_outside() -> TaskGraph:
    buffers = list(GRAPH.buffers)
    buffers[ENDS.buffer] = replace(buffers[ENDS.buffer], kind=BufferKind.INPUT)
    return replace(GRAPH, buffers=tuple(buffers))


def with_weight_view(**changes: Any) -> TaskGraph:
    tensors = list(GRAPH.tensors)
    weight = GRAPH.tasks[2].args[1].tensor
    tensors[weight] = replace(tensors[weight], **changes)
    return replace(GRAPH, tensors=tuple(tensors))


def used_twice() -> TaskGraph:
    again = Task(len(GRAPH.tasks), "x", reads=(UP,))
    return replace(GRAPH, tasks=(*GRAPH.tasks, again))


@pytest.mark.parametrize(
    "make",
    [
        lambda: layers_of_experts(num_layers=1, rows=8),
        given_from_outside,
        lambda: with_weight_view(stride=(1, 8, 512)),
        lambda: with_weight_view(shape=(4, 64, 64)),
        lambda: with_weight_view(offset=64),
        lambda: with_weight_view(dtype="int3"),
        used_twice,
        lambda: with_task(GRAPH, 2, args=GRAPH.tasks[2].args[:2]),
        lambda: with_task(GRAPH, 2, op="aten.mm.default"),
        lambda: with_weight_view(shape=(512, 64), stride=(64, 1)),
        lambda: looking_up(dtype="bool"),
        lambda: looking_up(rows=8),
        lambda: with_task(looking_up(), 2, args=(Ref(0), (None, Ref(ENDS.id)))),
    ],
    ids=[
        "all may be used",
        "given from outside",
        "slices are not blocks",
        "a part of the bytes",
        "an offset",
        "unknown element size",
        "used twice",
        "nothing tells",
        "another op",
        "one matrix, whose columns are in groups",
        "a mask",
        "as many numbers as slices",
        "not by the first dimension",
    ],
)
def test_others_are_not(make: Callable[[], TaskGraph]) -> None:
    assert UP not in routes(make())


def test_a_weight_in_the_place_of_the_rows_is_none() -> None:
    rows, _, ends = GRAPH.tasks[2].args
    assert UP not in routes(with_task(GRAPH, 2, args=(rows, rows, ends)))
    assert PRODUCT == GRAPH.tasks[2].op
