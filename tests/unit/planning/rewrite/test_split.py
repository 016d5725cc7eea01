"""Cutting weights and looking rows up: what the new taskgraph says, and what is left alone."""

from __future__ import annotations

import dataclasses
import struct

import pytest

from ds_finepage.execution.call_tensors import MovingViews
from ds_finepage.graph.taskgraph import JOIN, BufferKind, Length, Ref, TaskGraph
from ds_finepage.planning.liveness import live_activation_bytes
from ds_finepage.planning.rewrite.embeddings import gather_rows, looked_up_bytes, tables_to_leave
from ds_finepage.planning.rewrite.split import cut_weights, divisible_weights
from tests.property.matmul_chains import matmul_chain


def changed(graph: TaskGraph, tensor: int, **changes: object) -> TaskGraph:
    tensors = list(graph.tensors)
    tensors[tensor] = dataclasses.replace(tensors[tensor], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(graph, tensors=tuple(tensors))


def with_product(graph: TaskGraph, **changes: object) -> TaskGraph:
    lookup, product, *others = graph.tasks
    product = dataclasses.replace(product, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(graph, tasks=(lookup, product, *others))


def test_products_with_whole_weights_are_divisible() -> None:
    graph = matmul_chain([8, 16, 4])
    found = divisible_weights(graph)
    assert [(d.num_rows, d.row_bytes, d.task) for d in found] == [(16, 32, 1), (4, 64, 2)]


ADDMM = matmul_chain([8, 16], num_rows=2, with_bias=True)
BIAS, _, WEIGHT = (a.tensor for a in ADDMM.tasks[1].args)
(RESULT,) = ADDMM.tasks[1].results
TWICE = matmul_chain([8, 8, 8])
WIDTH = Length(16, "s0")
WHOLE = {
    "used twice": with_product(TWICE, args=TWICE.tasks[2].args, reads=TWICE.tasks[2].reads),
    "a scale": with_product(ADDMM, kwargs=(("alpha", 2),)),
    "a result in other strides": changed(ADDMM, RESULT, stride=(1, 2)),
    "a result as wide as the call says": changed(ADDMM, RESULT, stride=(WIDTH, 1)),
    "a weight as wide as the call says": changed(ADDMM, WEIGHT, shape=(8, WIDTH)),
    "a bias as wide as the call says": changed(ADDMM, BIAS, shape=(WIDTH,)),
    "a bias of one number": changed(ADDMM, BIAS, shape=(), stride=()),
    "a bias of one number in a row": changed(ADDMM, BIAS, shape=(1,), stride=(1,)),
}


@pytest.mark.parametrize("why", WHOLE)
def test_other_products_are_not(why: str) -> None:
    assert len(divisible_weights(ADDMM)) == 1
    assert divisible_weights(WHOLE[why]) == []


def test_one_task_a_slice_and_a_join() -> None:
    graph = matmul_chain([8, 16, 4])
    weight = divisible_weights(graph)[0].buffer
    cut = cut_weights(graph, {weight: [0, 4, 10]})
    assert [t.op.split(".")[1] for t in cut.tasks] == [
        "embedding", "mm", "mm", "mm", "join", "mm",
    ]  # fmt: skip
    assert [t.index for t in cut.tasks] == list(range(6))
    slices = [cut.buffers[t.reads[-1]] for t in cut.tasks[1:4]]
    assert [(s.offset, s.nbytes, s.name) for s in slices] == [
        (0, 128, "w0"), (128, 192, "w0"), (320, 192, "w0"),
    ]  # fmt: skip
    assert len({s.key for s in slices}) == 3
    outs = [cut.tensors[t.results[0]] for t in cut.tasks[1:4]]
    assert [(o.shape, o.offset, o.stride) for o in outs] == [
        ((1, 4), 0, (16, 1)), ((1, 6), 4, (16, 1)), ((1, 6), 10, (16, 1)),
    ]  # fmt: skip
    out = graph.tasks[1].writes[0]
    assert all(t.touches == (out,) and not t.writes for t in cut.tasks[1:4])
    assert cut.tasks[4].op == JOIN and cut.tasks[4].reads == (out,)


def test_bytes_and_work_are_neither_made_nor_lost() -> None:
    graph = matmul_chain([8, 16, 4])
    weight = divisible_weights(graph)[0].buffer
    measured = dataclasses.replace(graph.tasks[1], time_ns=160)
    graph = dataclasses.replace(graph, tasks=(graph.tasks[0], measured, *graph.tasks[2:]))
    cut = cut_weights(graph, {weight: [0, 4, 10]})
    assert [t.time_ns for t in cut.tasks[1:4]] == [40, 60, 60]
    assert cut.weight_bytes == graph.weight_bytes
    assert sum(t.flops for t in cut.tasks) == sum(t.flops for t in graph.tasks)


def test_the_bias_is_cut_like_the_columns() -> None:
    graph = matmul_chain([8, 16], with_bias=True)
    (weight,) = divisible_weights(graph)
    cut = cut_weights(graph, {weight.buffer: [0, 4]})
    biases = [cut.tensors[t.args[0].tensor] for t in cut.tasks[1:3]]
    assert [(b.shape, b.offset) for b in biases] == [((4,), 0), ((12,), 4)]


def test_a_bias_with_gaps_is_cut_in_its_own_steps() -> None:
    graph = matmul_chain([8, 16], with_bias=True)
    graph = changed(graph, graph.tasks[1].args[0].tensor, stride=(3,), offset=5)
    (weight,) = divisible_weights(graph)
    cut = cut_weights(graph, {weight.buffer: [0, 4, 6]})
    biases = [cut.tensors[t.args[0].tensor] for t in cut.tasks[1:4]]
    assert [(b.shape, b.stride, b.offset) for b in biases] == [
        ((4,), (3,), 5), ((2,), (3,), 17), ((10,), (3,), 23),
    ]  # fmt: skip


def test_no_cut_is_the_same_graph() -> None:
    graph = matmul_chain([8, 16])
    (weight,) = divisible_weights(graph)
    assert cut_weights(graph, {weight.buffer: [0]}) is graph


def test_rows_stand_in_for_the_table() -> None:
    graph = gather_rows(matmul_chain([8, 16], num_rows=3))
    (lookup, _) = graph.tasks
    rows, numbers = (graph.tensors[a.tensor] for a in lookup.args)
    assert graph.buffers[rows.buffer].nbytes == 3 * 8 * 4
    assert graph.buffers[rows.buffer].gather == graph.inputs[0].tensor
    assert graph.buffers[numbers.buffer].payload == struct.pack("=3q", 0, 1, 2)
    assert graph.weight_bytes == 3 * 8 * 4 + 8 * 16 * 4


def test_a_table_that_is_to_be_kept_stays() -> None:
    graph = matmul_chain([8, 16], num_rows=3)
    (table,) = (b.id for b in graph.buffers if b.name == "table")
    assert looked_up_bytes(graph) == {table: 3 * 8 * 4}
    assert gather_rows(graph, kept=frozenset({table})) is graph
    assert looked_up_bytes(gather_rows(graph)) == {}


LOOKUP = matmul_chain([8, 16], num_rows=3)
TABLE = LOOKUP.tasks[0].args[0].tensor
CHANGED_IDS = tuple(
    dataclasses.replace(b, kind=BufferKind.STATE) if b.kind is BufferKind.INPUT else b
    for b in LOOKUP.buffers
)
STAYS = {
    "smaller than its rows": matmul_chain([8, 16], num_rows=3, vocabulary=3),
    "rows stand in already": gather_rows(LOOKUP),
    "indices that the pass computes": dataclasses.replace(LOOKUP, inputs=()),
    "indices that the pass changes": dataclasses.replace(LOOKUP, buffers=CHANGED_IDS),
    "a part of a table": changed(LOOKUP, TABLE, shape=(25, 8)),
    "as much of a table as the call says": changed(LOOKUP, TABLE, shape=(Length(50, "s0"), 8)),
    "no index": matmul_chain([8, 16], num_rows=0),
}


@pytest.mark.parametrize("why", STAYS)
def test_a_table_stays(why: str) -> None:
    assert gather_rows(STAYS[why]) == STAYS[why]


def test_a_table_that_a_product_uses_too_stays_for_the_product() -> None:
    graph = matmul_chain([8, 16])
    tied = dataclasses.replace(
        graph.tasks[1],
        args=(graph.tasks[1].args[0], Ref(1)),
        reads=tuple(sorted({1, graph.tensors[graph.tasks[1].args[0].tensor].buffer})),
    )
    graph = dataclasses.replace(graph, tasks=(graph.tasks[0], tied))
    found = gather_rows(graph)
    assert found.buffers[1].kind is BufferKind.WEIGHT
    assert found.buffers[1].nbytes == graph.buffers[1].nbytes


def test_a_table_with_another_use_stays_whole_where_it_has_room_beside_activations() -> None:
    graph = matmul_chain([8, 16], num_rows=3)
    assert not tables_to_leave(graph, 10**6)
    again = dataclasses.replace(graph.tasks[0], index=len(graph.tasks))
    graph = dataclasses.replace(graph, tasks=(*graph.tasks, again))
    (table,) = (b for b in graph.buffers if b.name == "table")
    least = table.nbytes + max(live_activation_bytes(graph, alignment=1))
    assert tables_to_leave(graph, least) == {table.id}
    assert gather_rows(graph, kept={table.id}) is graph
    assert not tables_to_leave(graph, least - 1)


# Sizes that differ from call to call.

PLANNED_ROWS = 16


def of_any_length(graph: TaskGraph) -> TaskGraph:
    """Say that the rows of all activations follow from an argument."""
    rows = Length(PLANNED_ROWS, "s0")
    tensors = tuple(
        dataclasses.replace(t, shape=(rows, *t.shape[1:]))
        if graph.buffers[t.buffer].kind is not BufferKind.WEIGHT
        else t
        for t in graph.tensors
    )
    return dataclasses.replace(graph, tensors=tensors, symbols=(("s0", 0),))


@pytest.mark.parametrize("with_bias", (False, True))
def test_a_cut_of_any_length_is_the_cut_of_each_length(with_bias: bool) -> None:
    widths = [8, 16, 24]
    many = of_any_length(matmul_chain(widths, num_rows=PLANNED_ROWS, with_bias=with_bias))
    cuts = {d.buffer: [0, 4, 10] for d in divisible_weights(many)}
    assert len(cuts) == 2
    cut = cut_weights(many, cuts)
    assert cut.symbols == many.symbols
    moving = MovingViews(cut)
    for num_rows in (7, 1, PLANNED_ROWS, 3):
        assert moving.set_sizes([num_rows])
        one = matmul_chain(widths, num_rows=num_rows, with_bias=with_bias)
        views = tuple(moving.view(tensor.id) for tensor in cut.tensors)
        assert views == cut_weights(one, cuts).tensors


def test_a_bias_that_begins_elsewhere_in_each_call_is_cut_from_there() -> None:
    graph = of_any_length(matmul_chain([8, 16], num_rows=PLANNED_ROWS, with_bias=True))
    graph = changed(graph, graph.tasks[1].args[0].tensor, offset=Length(32, "2*s0"))
    (weight,) = divisible_weights(graph)
    cut = cut_weights(graph, {weight.buffer: [0, 4]})
    moving = MovingViews(cut)
    biases = [t.args[0].tensor for t in cut.tasks[1:3]]
    for num_rows in (PLANNED_ROWS, 3):
        assert moving.set_sizes([num_rows])
        assert [moving.view(b).offset for b in biases] == [2 * num_rows, 2 * num_rows + 4]


def test_rows_of_an_embedding_lie_where_those_of_the_longest_call_would() -> None:
    graph = gather_rows(of_any_length(matmul_chain([8, 16], num_rows=PLANNED_ROWS)))
    moving = MovingViews(graph)
    assert moving.set_sizes([3])
    rows, numbers = (moving.view(a.tensor) for a in graph.tasks[0].args)
    assert rows.shape == (PLANNED_ROWS, 8)
    assert (numbers.shape, numbers.stride) == ((3,), (1,))
