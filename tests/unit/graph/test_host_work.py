"""What a product costs the host."""

from __future__ import annotations

import pytest

from ds_finepage.graph.arguments import Ref
from ds_finepage.graph.host_work import UNPACKING_FLOPS, host_work
from ds_finepage.graph.packed import FEW_ROWS, PACKED_GROUPED, PACKED_LINEAR
from ds_finepage.graph.taskgraph import Task, TaskGraph, TensorView


def graph_of(op: str, rows: int, *matrices: int) -> TaskGraph:
    """Return a product of rows with int4 matrices of (6, 128), in groups of 64."""
    shapes = [(rows, 128), (*matrices, 6, 64), (*matrices, 6, 2), (*matrices, 6, 2), (rows, 6)]
    dtypes = ["bfloat16", "uint8", "bfloat16", "bfloat16", "bfloat16"]
    tensors = tuple(
        TensorView(id=i, buffer=0, dtype=dtype, shape=shape, stride=(1,) * len(shape))
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    )
    args = (*map(Ref, range(4)), None, 4, 64)
    task = Task(index=0, op=op, args=args, results=(4,), flops=1000, moved_bytes=10**6)
    return TaskGraph(name="", buffers=(), tensors=tensors, tasks=(task,))


def test_the_host_reads_packed_numbers_where_rows_are_few() -> None:
    graph = graph_of(PACKED_LINEAR, 2)
    packed_bytes, other_bytes = 6 * 64 + 2 * 6 * 2 * 2, 2 * (2 * 128 + 2 * 6)
    expected = packed_bytes + other_bytes, UNPACKING_FLOPS * 1000
    assert host_work(graph, graph.tasks[0]) == expected


@pytest.mark.parametrize(("num_rows", "used"), [(3, 3), (7, 4)])
def test_no_row_needs_more_than_one_matrix(num_rows: int, used: int) -> None:
    graph = graph_of(PACKED_GROUPED, num_rows, 4)
    packed_bytes, other_bytes = used * (6 * 64 + 2 * 6 * 2 * 2), 2 * num_rows * (128 + 6)
    assert host_work(graph, graph.tasks[0])[0] == packed_bytes + other_bytes


@pytest.mark.parametrize(("op", "rows"), [(PACKED_LINEAR, FEW_ROWS + 1), ("aten.mm.default", 1)])
def test_other_products_cost_what_they_cost_the_device(op: str, rows: int) -> None:
    graph = graph_of(op, rows)
    assert host_work(graph, graph.tasks[0]) == (10**6, 1000)
