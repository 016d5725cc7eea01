"""Products for the host: which tasks run there, and what is left to the device."""

from __future__ import annotations

import dataclasses

import pytest

from ds_finepage.checker.checker import violations
from ds_finepage.checker.faults import Fault
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.taskgraph import JOIN, BufferKind, TaskGraph
from ds_finepage.planning.budget import non_arena_bytes
from ds_finepage.planning.finepage.search import plan_finepage
from ds_finepage.planning.liveness import needed_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.host_products import host_bytes, with_host_rows
from ds_finepage.planning.rewrite.split import cut_weights, divisible_weights
from tests.property.matmul_chains import matmul_chain

GRAPH = matmul_chain([8, 16, 4], with_bias=True)
UNITS = divisible_weights(GRAPH)
FIRST, SECOND = (unit.buffer for unit in UNITS)


def on_host(rows: dict[int, int]) -> TaskGraph:
    return with_host_rows(GRAPH, UNITS, rows)


def test_a_whole_weight_is_read_where_it_lies() -> None:
    found = on_host({FIRST: 16})
    assert found.tasks == GRAPH.tasks and found.host_tasks == {1}
    assert [b.id for b in found.buffers if b.kind is BufferKind.MASTER] == [FIRST]
    assert host_bytes(found) == 16 * 8 * 4
    assert found.weight_bytes == GRAPH.weight_bytes
    assert needed_arena_bytes(found, 1) == needed_arena_bytes(GRAPH, 1) - host_bytes(found)
    assert non_arena_bytes(found, 64) == non_arena_bytes(GRAPH, 64)  # it takes no device bytes


def test_a_task_of_the_host_has_its_workspace_beside_that_of_the_others() -> None:
    tasks = tuple(dataclasses.replace(t, workspace_bytes=10 + t.index) for t in GRAPH.tasks)
    graph = dataclasses.replace(GRAPH, tasks=tasks)
    assert graph.workspace_bytes == 12
    assert with_host_rows(graph, UNITS, {SECOND: 4}).workspace_bytes == 11 + 12


def test_rows_that_a_call_looks_up_stay_on_the_device() -> None:
    rows = dataclasses.replace(GRAPH.buffers[1], name="w0", gather=0)
    graph = dataclasses.replace(GRAPH, buffers=(GRAPH.buffers[0], rows, *GRAPH.buffers[2:]))
    found = with_host_rows(graph, UNITS, {FIRST: 16})
    assert found.buffers[1] == rows and found.host_tasks == {1}


def test_no_rows_leave_the_pass_as_it_is() -> None:
    assert on_host({}) == on_host({FIRST: 0}) == GRAPH
    assert not GRAPH.host_tasks


def test_the_last_rows_of_a_cut_weight_are_read_where_they_lie() -> None:
    found = on_host({FIRST: 6, SECOND: 4})
    device, host, join, second = found.tasks[1:]
    assert join.op == JOIN and found.host_tasks == {host.index, second.index}
    (out,) = {GRAPH.tensors[r].buffer for r in GRAPH.tasks[1].results if r is not None}
    assert device.touches == host.touches == join.reads == (out,)
    (master,) = (b for b in found.buffers if b.id in host.reads and b.kind is BufferKind.MASTER)
    assert (master.name, master.offset, master.nbytes) == ("w0", 10 * 32, 6 * 32)
    assert host_bytes(found) == 6 * 32 + 4 * 16 * 4
    assert host.moved_bytes + device.moved_bytes >= GRAPH.tasks[1].moved_bytes


def test_the_part_of_the_device_can_be_cut_again() -> None:
    found = on_host({FIRST: 6})
    part, other = divisible_weights(found)
    assert (part.buffer, part.num_rows, other.buffer) == (FIRST, 10, SECOND)
    cut = cut_weights(found, {FIRST: (0, 4)})
    first, second, host, join = cut.tasks[1:5]
    assert {t.touches for t in (first, second, host)} == {join.reads}
    assert [t.op for t in cut.tasks].count(JOIN) == 1 and cut.host_tasks == {host.index}
    # Without the host, slices stay as they are.
    assert [d.buffer for d in divisible_weights(cut_weights(GRAPH, {FIRST: (0, 4)}))] == [SECOND]


@pytest.mark.parametrize("rows", [{FIRST: 16}, {FIRST: 6, SECOND: 1}])
def test_plans_pass_the_checker_and_have_a_lane_of_the_host(rows: dict[int, int]) -> None:
    found = on_host(rows)
    for split in (False, True):
        plan = plan_finepage(Problem(found, needed_arena_bytes(found, 64), 64, split=split))
        assert violations(plan) == []
        lanes = {n.task: plan.lane_of(n) for n in plan.nodes if n.task in plan.graph.host_tasks}
        assert lanes and set(lanes.values()) == {Lane.HOST}
        assert not any(
            plan.graph.buffers[n.buffer].kind is BufferKind.MASTER
            for n in plan.nodes
            if n.buffer is not None
        )


def test_a_task_that_changes_a_master_is_found() -> None:
    found = on_host({FIRST: 16})
    plan = plan_finepage(Problem(found, needed_arena_bytes(found, 64), 64))
    task = dataclasses.replace(
        found.tasks[1], writes=tuple(sorted({*found.tasks[1].writes, FIRST}))
    )
    tasks = (found.tasks[0], task, *found.tasks[2:])
    bad = dataclasses.replace(plan, graph=dataclasses.replace(found, tasks=tasks))
    assert Fault.WEIGHT_WRITTEN in {v.fault for v in violations(bad)}
