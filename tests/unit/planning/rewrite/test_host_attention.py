"""Attention for the host: what it reads, and what is left to the device."""

from __future__ import annotations

import pytest

from ds_finepage.checker.checker import violations
from ds_finepage.graph.attention import ATTENTION_FLOPS, HOST_ATTENTION, attentions
from ds_finepage.graph.host_work import host_work
from ds_finepage.graph.memgraph import Lane, NodeKind
from ds_finepage.graph.taskgraph import TO_HOST, BufferKind, TaskGraph
from ds_finepage.planning.budget import non_arena_bytes
from ds_finepage.planning.finepage.search import plan_finepage
from ds_finepage.planning.liveness import needed_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.host_attention import host_task, with_host_attention
from ds_finepage.planning.rewrite.host_products import host_bytes
from tests.unit.graph.attended import BATCH, HEADS, WIDTH, Layers, attended

GRAPH = attended(3)
UNITS = attentions(GRAPH)


def on_host(*layers: int) -> TaskGraph:
    return with_host_attention(GRAPH, [UNITS[n] for n in layers])


def test_rows_of_the_host_take_no_device_bytes_and_no_copies() -> None:
    found = on_host(1)
    assert [t.op for t in found.tasks].count("aten.copy_.default") == 4
    assert [t.index for t in found.tasks] == list(range(len(GRAPH.tasks) - 2))
    (task,) = found.host_tasks
    assert found.tasks[task].op == HOST_ATTENTION
    masters = [b.id for b in found.buffers if b.kind is BufferKind.MASTER]
    assert tuple(masters) == UNITS[1].rows and host_bytes(found) == UNITS[1].nbytes
    assert needed_arena_bytes(found, 1) <= needed_arena_bytes(GRAPH, 1) - UNITS[1].nbytes
    assert non_arena_bytes(found, 64) <= non_arena_bytes(GRAPH, 64) + 2 * found.workspace_bytes
    assert found.weight_bytes == GRAPH.weight_bytes and not found.calls


def test_a_plan_waits_until_the_new_rows_are_in_host_memory() -> None:
    graph = on_host(0, 1, 2)
    plan = plan_finepage(Problem(graph, 1 << 16, 64))
    assert violations(plan) == [] and plan.reloaded_bytes == 0
    nodes = {node.task: node.id for node in plan.nodes if node.kind is NodeKind.COMPUTE}
    lanes = [plan.lane_of(plan.nodes[nodes[task]]) for task in sorted(graph.host_tasks)]
    assert lanes == [Lane.HOST] * 3
    sent = [task.index for task in graph.tasks if task.op == TO_HOST]
    edges = {(edge.before, edge.after) for edge in plan.edges}
    for n, task in enumerate(sorted(graph.host_tasks)):
        assert {(nodes[s], nodes[task]) for s in sent[2 * n : 2 * n + 2]} <= edges


def test_no_layers_leave_the_pass_as_it_is() -> None:
    assert on_host().tasks == GRAPH.tasks and not on_host().host_tasks


@pytest.mark.parametrize("heads", [1, HEADS])
def test_a_mask_goes_down_once(heads: int) -> None:
    layers = Layers()
    whole = layers.tensor((BATCH, 1, 1, 31), BufferKind.ACTIVATION)
    view = layers.view(layers.tensors[whole].buffer, (BATCH, heads, 1, 31), (31, 0, 31, 1))
    layers.attend(mask=view)
    graph = layers.graph()
    found = with_host_attention(graph, attentions(graph))
    (task,) = found.host_tasks
    mask = found.tensors[found.tasks[task].args[5].tensor]
    assert (mask.shape, mask.stride[2:]) == ((BATCH, 1, 1, 31), (31, 1))
    assert [t.id for t in found.tensors] == list(range(len(graph.tensors) + (heads > 1)))


def test_it_reads_each_row_once() -> None:
    unit = attentions(GRAPH)[0]
    task = host_task(GRAPH, unit)
    assert task.moved_bytes == unit.nbytes + 2 * 4 * BATCH * HEADS * WIDTH
    assert host_work(GRAPH, task) == (task.moved_bytes, ATTENTION_FLOPS * 100)


@pytest.mark.parametrize("num_live", [30, 1000, 100_000])
def test_its_workspace_grows_with_the_spans(num_live: int) -> None:
    graph = attended(num_live=num_live)
    found = host_task(graph, attentions(graph)[0]).workspace_bytes
    spans = {30: 1, 1000: 4, 100_000: 64}[num_live]
    parts = BATCH * HEADS * (4 * WIDTH + spans * (WIDTH + 2))
    assert found == 4 * (parts + 2 * BATCH * (num_live + 1))
