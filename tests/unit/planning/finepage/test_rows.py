"""Rows of KV caches in host memory compete with weights for the same bytes."""

from __future__ import annotations

import dataclasses

import pytest

from ds_finepage.checker.checker import check, violations
from ds_finepage.checker.faults import Fault
from ds_finepage.graph.memgraph import Extent, MemGraph
from ds_finepage.graph.taskgraph import Buffer, BufferKind, Task, TaskGraph, TensorView
from ds_finepage.planning.bounds import lower_bound_bytes
from ds_finepage.planning.builder import MemGraphBuilder
from ds_finepage.planning.liveness import needed_arena_bytes
from ds_finepage.planning.rewrite.embeddings import gather_rows
from ds_finepage.planning.simulator import simulate
from tests.property.matmul_chains import matmul_chain
from tests.unit.planning.finepage.test_search import machine
from tests.unit.planning.steady import plan_steady

UNIT, WEIGHT, ROWS, LAYERS = 64, 640, 6400, 8


def attending(num_layers: int = LAYERS) -> TaskGraph:
    """Each layer multiplies by a weight, writes keys and values, and reads all of them."""
    buffers: list[Buffer] = []
    tensors: list[TensorView] = []
    tasks: list[Task] = []

    def made(kind: BufferKind, nbytes: int, name: str = "", gather: int | None = None) -> int:
        at = len(buffers)
        buffers.append(Buffer(at, kind, nbytes, name, gather=gather))
        tensors.append(TensorView(at, at, "float32", (nbytes // 4,), (1,)))
        return at

    def task(op: str, reads: list[int], writes: list[int]) -> None:
        found = tuple(sorted(reads)), tuple(sorted(writes))
        tasks.append(Task(len(tasks), op, reads=found[0], writes=found[1], time_ns=100))

    h = made(BufferKind.INPUT, UNIT)
    for layer in range(num_layers):
        weight = made(BufferKind.WEIGHT, WEIGHT, f"layers.{layer}.weight")
        out = made(BufferKind.ACTIVATION, UNIT)
        task("aten.mm.default", [h, weight], [out])
        rows = []
        for which in range(2):
            given = made(BufferKind.HOST, ROWS)
            rows.append(made(BufferKind.WEIGHT, ROWS, f"KV rows {2 * layer + which}", given))
            task("aten.copy_.default", [out, rows[-1]], [rows[-1]])
        h = made(BufferKind.ACTIVATION, UNIT)
        task("aten.attend.default", [out, *rows], [h])
    last = made(BufferKind.OUTPUT, UNIT)
    task("aten.neg.default", [h], [last])
    return TaskGraph("attending", tuple(buffers), tuple(tensors), tuple(tasks))


GRAPH = attending()
WHOLE = LAYERS * (WEIGHT + 2 * ROWS)
FAST = dataclasses.replace(machine(h2d=1e9), transfer_latency_ns=10)


def planned(arena_bytes: int, policy: str = "finepage", *, split: bool = False) -> MemGraph:
    return check(
        plan_steady(GRAPH, arena_bytes=arena_bytes, policy=policy, profile=FAST, split=split)
    )


def kept(memgraph: MemGraph) -> set[str]:
    return {memgraph.graph.buffers[r.buffer].name for r in memgraph.entry}


def test_rows_that_have_room_stay() -> None:
    memgraph = planned(WHOLE + 4 * UNIT)
    assert memgraph.reloaded_bytes == 0
    assert len(kept(memgraph)) == 3 * LAYERS


@pytest.mark.parametrize("num_missing", (1, 3, LAYERS - 1))
def test_only_one_buffer_of_a_layer_streams_while_that_is_enough(num_missing: int) -> None:
    """So the ring has room for one, and the pass reloads one more than is missing."""
    memgraph = planned(WHOLE + 4 * UNIT - num_missing * ROWS)
    assert memgraph.reloaded_bytes == (num_missing + 1) * ROWS
    assert {f"KV rows {2 * layer}" for layer in range(LAYERS)} <= kept(memgraph)


@pytest.mark.parametrize("split", (False, True))
@pytest.mark.parametrize("percent", (20, 40, 60, 80))
def test_reloads_stay_close_to_the_bound(percent: int, split: bool) -> None:
    arena_bytes = WHOLE * percent // 100
    memgraph = planned(arena_bytes, split=split)
    least = lower_bound_bytes(GRAPH, arena_bytes, UNIT, may_cut=True)
    assert least <= memgraph.reloaded_bytes <= least + 3 * ROWS


def test_little_that_is_missing_streams_as_slices_of_weights() -> None:
    """So it is spread over the pass, which no whole buffer of rows is."""
    graph = gather_rows(matmul_chain([256] * 9, num_rows=4))
    rows = [
        Buffer(len(graph.buffers), BufferKind.HOST, 1 << 17),
        Buffer(
            len(graph.buffers) + 1,
            BufferKind.WEIGHT,
            1 << 17,
            "KV rows 0",
            gather=len(graph.tensors),
        ),
    ]
    given = TensorView(len(graph.tensors), rows[0].id, "float32", (1 << 15,), (1,))
    last = graph.tasks[-1]
    reads = tuple(sorted((*last.reads, rows[1].id)))
    graph = dataclasses.replace(
        graph,
        buffers=(*graph.buffers, *rows),
        tensors=(*graph.tensors, given),
        tasks=(*graph.tasks[:-1], dataclasses.replace(last, reads=reads)),
    )
    arena_bytes = needed_arena_bytes(graph, UNIT) - (1 << 15)
    memgraph = plan_steady(
        graph, arena_bytes=arena_bytes, policy="finepage", profile=FAST, split=True
    )
    assert "KV rows 0" in kept(memgraph)
    assert 0 < check(memgraph).reloaded_bytes < 1 << 17


def test_more_room_never_takes_more_time() -> None:
    times = [
        simulate(planned(WHOLE * percent // 100), FAST).total_ns for percent in range(20, 105, 5)
    ]
    assert all(later <= 1.01 * now for now, later in zip(times, times[1:], strict=False))
    assert times[-1] < times[0] / 2


@pytest.mark.parametrize("policy", ("horizon", "lru", "horizon-published"))
@pytest.mark.parametrize("spare", (WEIGHT, ROWS, 3 * ROWS))
def test_other_policies_never_lose_what_a_pass_writes(policy: str, spare: int) -> None:
    planned(2 * ROWS + 2 * UNIT + spare, policy)


def test_rows_may_not_end_as_they_began() -> None:
    """The next pass takes what it finds in the arena for the rows with the new ones."""
    builder = MemGraphBuilder(attending(1), "finepage", 2 * ROWS + WEIGHT + 4 * UNIT, UNIT)
    builder.begin(())
    sizes = {1: WEIGHT, 2: UNIT, 4: ROWS, 6: ROWS, 7: UNIT}
    offset = 0
    for buffer, nbytes in sizes.items():
        extent = Extent(offset, nbytes)
        builder.alloc(buffer, extent, [])
        offset = extent.end
        if nbytes > UNIT:
            builder.reload(buffer)
    for task in attending(1).tasks:
        builder.compute(task)
    keys = builder.states[4].extent
    assert keys is not None
    vacated = builder.drop(4)
    for buffer in (1, 2, 6, 7):
        builder.drop(buffer)
    good = builder.finish()
    assert violations(good) == []
    builder.alloc(4, keys, [vacated])
    builder.states[4].is_on_host = True  # the rows without the new one
    builder.reload(4)
    found = {v.fault for v in violations(builder.finish())}
    assert found == {Fault.NO_HOST_COPY, Fault.STALE_CONTENTS}


def test_a_weight_that_is_no_rows_may_not_change() -> None:
    graph = attending(1)
    plain = [dataclasses.replace(b, gather=None) for b in graph.buffers]
    graph = dataclasses.replace(graph, buffers=tuple(plain))
    memgraph = dataclasses.replace(
        planned(WHOLE), graph=graph, nodes=(), edges=(), entry=(), exit=()
    )
    assert Fault.WEIGHT_WRITTEN in {v.fault for v in violations(memgraph)}
