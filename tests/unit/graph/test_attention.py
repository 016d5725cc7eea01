"""Which attention the host can compute."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ds_finepage.graph.attention import MOST_QUERIES, attentions
from ds_finepage.graph.taskgraph import BufferKind, Ref, Task, TaskGraph
from tests.unit.graph.attended import BATCH, EFFICIENT, HEADS, Layers, attended


def changed(graph: TaskGraph, task: int, **fields: Any) -> TaskGraph:
    tasks = list(graph.tasks)
    tasks[task] = dataclasses.replace(tasks[task], **fields)
    return dataclasses.replace(graph, tasks=tuple(tasks))


def names(graph: TaskGraph, refs: Any) -> list[str]:
    return [graph.buffers[graph.tensors[ref.tensor].buffer].kind.value for ref in refs]


def test_it_reads_the_rows_and_the_new_ones_in_host_memory() -> None:
    graph = attended(2)
    first, second = attentions(graph)
    assert (first.task, second.task) == (6, 13) and first.copied == {1, 4}
    query, *states, mask, scale = first.args
    assert names(graph, [query]) == ["input"] and names(graph, states) == ["host"] * 4
    shapes = [graph.tensors[ref.tensor].shape[0] for ref in states]
    assert shapes == [30, 1, 30, 1] and (mask, scale) == (None, 0.5)
    assert [graph.buffers[b].name for b in second.rows] == ["KV rows 2", "KV rows 3"]
    assert first.nbytes == 2 * 33 * BATCH * 2 * 8 * 4


@pytest.mark.parametrize("op", [None, EFFICIENT])
def test_a_mask_that_all_heads_share_goes_along(op: str | None) -> None:
    for num_heads, is_found in ((1, True), (HEADS, False)):
        layers = Layers()
        mask = layers.tensor((BATCH, num_heads, 1, 31), BufferKind.ACTIVATION)
        layers.attend(mask=mask, **({"op": op} if op else {}))
        assert [found.args[5] for found in attentions(layers.graph())] == [Ref(mask)] * is_found


def test_a_mask_that_is_named_for_each_head_goes_along_too() -> None:
    layers = Layers()
    mask = layers.tensors[layers.tensor((BATCH, 1, 1, 31), BufferKind.ACTIVATION)]
    layers.attend(mask=layers.view(mask.buffer, (BATCH, HEADS, 1, 31), (31, 0, 31, 1)))
    assert len(attentions(layers.graph())) == 1


@pytest.mark.parametrize("num_new", [1, MOST_QUERIES, MOST_QUERIES + 1])
def test_few_queries_are_attended_to(num_new: int) -> None:
    assert len(attentions(attended(num_new=num_new))) == (num_new <= MOST_QUERIES)


@pytest.mark.parametrize("named", [{"is_causal": True}, {"dropout_p": 0.1}])
def test_it_neither_drops_nor_hides_tokens(named: dict[str, Any]) -> None:
    layers = Layers()
    layers.attend(**named)
    assert attentions(layers.graph()) == []


def test_heads_share_keys_evenly() -> None:
    assert attentions(attended(shared=4)) and not attentions(attended(shared=3))


def test_other_dtypes_stay_on_the_device() -> None:
    graph = attended()
    tensors = tuple(dataclasses.replace(t, dtype="float64") for t in graph.tensors)
    assert attentions(dataclasses.replace(graph, tensors=tensors)) == []


def test_what_reads_its_sums_or_rows_needs_them_on_the_device() -> None:
    graph = attended()
    rows, sums = attentions(graph)[0].rows, graph.tensors[graph.tasks[6].results[1] or 0].buffer
    for buffer in (*rows, sums):
        reader = Task(7, "aten.neg.default", reads=(buffer,))
        assert attentions(dataclasses.replace(graph, tasks=(*graph.tasks, reader))) == []


@pytest.mark.parametrize(
    "fields", [{"offset": 8}, {"shape": (BATCH, 2, 30, 8)}, {"stride": (16, 16, 32, 1)}]
)
def test_it_attends_to_all_rows_as_they_lie(fields: dict[str, Any]) -> None:
    graph = attended()
    place = graph.tasks[6].args[1].tensor
    tensors = list(graph.tensors)
    tensors[place] = dataclasses.replace(tensors[place], **fields)
    assert attentions(dataclasses.replace(graph, tensors=tuple(tensors))) == []


def test_rows_that_no_call_gives_stay_on_the_device() -> None:
    graph = attended()
    given = graph.tensors[graph.buffers[attentions(graph)[0].rows[0]].gather or 0].buffer
    buffers = tuple(
        dataclasses.replace(b, kind=BufferKind.INPUT) if b.id == given else b for b in graph.buffers
    )
    assert attentions(dataclasses.replace(graph, buffers=buffers)) == []


def test_new_rows_have_to_be_in_host_memory() -> None:
    graph = attended()
    assert attentions(changed(graph, 2, op="aten.neg.default")) == []
    assert attentions(changed(graph, 1, op="aten.add_.Tensor")) == []
