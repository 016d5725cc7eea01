"""What collectives move between ranks, and the digest of their order."""

from __future__ import annotations

import pytest

from ds_finepage.graph.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    is_collective,
    order_of,
    traffic_of,
)
from ds_finepage.graph.taskgraph import Buffer, BufferKind, Ref, Task, TaskGraph, TensorView


def graph_of(*ops: str, rows: int = 4, group: str = "0", dtype: str = "float32") -> TaskGraph:
    """Return tasks in a row, on one tensor of ``rows`` x 8 that all of four ranks have."""
    arguments = {ALL_REDUCE: (Ref(0), "sum", group, 4), ALL_GATHER: (Ref(0), Ref(0), group, 4)}
    return TaskGraph(
        "sketch",
        (Buffer(0, BufferKind.ACTIVATION, rows * 32),),
        (TensorView(0, 0, dtype, (rows, 8), (8, 1)),),
        tuple(Task(i, op, args=arguments.get(op, (Ref(0),))) for i, op in enumerate(ops)),
    )


@pytest.mark.parametrize(("op", "steps"), [(ALL_REDUCE, 6), (ALL_GATHER, 3)])
def test_each_step_sends_a_share_of_the_result(op: str, steps: int) -> None:
    graph = graph_of(op)
    assert traffic_of(graph, graph.tasks[0]) == (steps, steps * 32)
    graph = graph_of(op, dtype="int64")
    assert traffic_of(graph, graph.tasks[0]) == (steps, steps * 64)


def test_a_share_is_rounded_up() -> None:
    graph = graph_of(ALL_GATHER, dtype="float8_e4m3fn", rows=1)
    assert traffic_of(graph, graph.tasks[0]) == (3, 6)


def test_only_tasks_that_wait_for_other_ranks_are_collectives() -> None:
    graph = graph_of("aten.neg.default", ALL_REDUCE, ALL_GATHER)
    assert [is_collective(t) for t in graph.tasks] == [False, True, True]


def test_the_digest_tells_order_group_and_dtype_and_nothing_else() -> None:
    first = order_of(graph_of(ALL_REDUCE, ALL_GATHER))
    assert first == order_of(graph_of(ALL_REDUCE, "aten.neg.default", ALL_GATHER, rows=9))
    others = (
        graph_of(ALL_GATHER, ALL_REDUCE),
        graph_of(ALL_REDUCE),
        graph_of(ALL_REDUCE, ALL_GATHER, group="1"),
        graph_of(ALL_REDUCE, ALL_GATHER, dtype="bfloat16"),
    )
    assert first not in map(order_of, others)
