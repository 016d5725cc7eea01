"""Cutting weights and looking rows up: what the new taskgraph says, and what is left alone."""

from __future__ import annotations

import dataclasses
import struct

from ds_finepage.graph.taskgraph import JOIN, BufferKind, Ref
from ds_finepage.planning.split import cut_weights, divisible_weights, gather_rows
from tests.property.matmul_chains import matmul_chain


def test_products_with_whole_weights_are_divisible() -> None:
    graph = matmul_chain([8, 16, 4])
    found = divisible_weights(graph)
    assert [(d.num_rows, d.row_bytes, d.task) for d in found] == [(16, 32, 1), (4, 64, 2)]


def test_a_weight_that_is_used_twice_is_not() -> None:
    graph = matmul_chain([8, 8, 8])
    twice = dataclasses.replace(graph.tasks[2], args=graph.tasks[1].args, reads=(2, 3))
    graph = dataclasses.replace(graph, tasks=(*graph.tasks[:2], twice))
    assert divisible_weights(graph) == []


def test_a_product_with_a_scale_is_not() -> None:
    graph = matmul_chain([8, 16], with_bias=True)
    scaled = dataclasses.replace(graph.tasks[1], kwargs=(("alpha", 2),))
    graph = dataclasses.replace(graph, tasks=(graph.tasks[0], scaled))
    assert divisible_weights(graph) == []


def test_a_result_in_other_strides_is_not() -> None:
    graph = matmul_chain([8, 16], num_rows=2)
    (result,) = graph.tasks[1].results
    assert result is not None
    tensors = list(graph.tensors)
    tensors[result] = dataclasses.replace(tensors[result], stride=(1, 2))
    assert divisible_weights(dataclasses.replace(graph, tensors=tuple(tensors))) == []


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
    cut = cut_weights(graph, {weight: [0, 4, 10]})
    assert cut.weight_bytes == graph.weight_bytes
    assert sum(t.flops for t in cut.tasks) == sum(t.flops for t in graph.tasks)


def test_the_bias_is_cut_like_the_columns() -> None:
    graph = matmul_chain([8, 16], with_bias=True)
    (weight,) = divisible_weights(graph)
    cut = cut_weights(graph, {weight.buffer: [0, 4]})
    biases = [cut.tensors[t.args[0].tensor] for t in cut.tasks[1:3]]
    assert [(b.shape, b.offset) for b in biases] == [((4,), 0), ((12,), 4)]


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


def test_a_table_that_is_smaller_than_its_rows_stays() -> None:
    graph = matmul_chain([8, 16], num_rows=3, vocabulary=3)
    assert gather_rows(graph) == graph


def test_indices_that_the_pass_computes_are_not_known_before_it() -> None:
    graph = matmul_chain([8, 16], num_rows=3)
    assert gather_rows(dataclasses.replace(graph, inputs=())).tasks == graph.tasks


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


def test_indices_that_the_pass_changes_are_not_known_before_it() -> None:
    graph = matmul_chain([8, 16], num_rows=3)
    (ids,) = (b for b in graph.buffers if b.kind is BufferKind.INPUT)
    buffers = list(graph.buffers)
    buffers[ids.id] = dataclasses.replace(ids, kind=BufferKind.STATE)
    graph = dataclasses.replace(graph, buffers=tuple(buffers))
    assert gather_rows(graph) == graph


def test_rows_of_a_part_of_a_table_are_left_to_the_table() -> None:
    graph = matmul_chain([8, 16], num_rows=3)
    table = graph.tensors[graph.tasks[0].args[0].tensor]
    tensors = list(graph.tensors)
    tensors[table.id] = dataclasses.replace(table, shape=(table.shape[0] // 2, table.shape[1]))
    graph = dataclasses.replace(graph, tensors=tuple(tensors))
    assert gather_rows(graph) == graph


def test_no_index_is_nothing_to_gather() -> None:
    graph = matmul_chain([8, 16], num_rows=0)
    assert gather_rows(graph) == graph


def test_a_table_with_another_use_can_be_left_whole() -> None:
    graph = matmul_chain([8, 16], num_rows=3)
    assert gather_rows(graph, whole_tables=True) == gather_rows(graph)
    again = dataclasses.replace(graph.tasks[0], index=len(graph.tasks))
    graph = dataclasses.replace(graph, tasks=(*graph.tasks, again))
    assert gather_rows(graph, whole_tables=True) == graph
    assert gather_rows(graph) != graph
