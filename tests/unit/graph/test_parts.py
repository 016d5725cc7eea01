"""Taskgraphs whose weights lie in parts on several ranks."""

from __future__ import annotations

from dataclasses import replace

from ds_finepage.graph.codec import dumps, fingerprint, loads
from ds_finepage.graph.parts import on_device, with_parts
from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import Buffer, BufferKind, Symbol, Task, TaskGraph
from ds_finepage.planning.rewrite.embeddings import gather_rows
from tests.unit.execution.graphs import ACTIVATION, INPUT, OUTPUT, WEIGHT, Draft

PART_BYTES = 128


def parted(*, num_weights: int, num_ranks: int = 2) -> TaskGraph:
    """Return a chain of tasks, each of which reads a weight of its own of 256 bytes."""
    kinds = [BufferKind.WEIGHT] * num_weights + [BufferKind.ACTIVATION] * num_weights
    buffers = [Buffer(i, k, 2 * PART_BYTES, f"b{i}") for i, k in enumerate(kinds)]
    tasks = [
        Task(
            i,
            "x",
            reads=(i,) if i == 0 else (i, num_weights + i - 1),
            writes=(num_weights + i,),
            flops=1000,
        )
        for i in range(num_weights)
    ]
    graph = TaskGraph("parts", tuple(buffers), (), tuple(tasks))
    whole_bytes = {f"b{i}": 2 * PART_BYTES for i in range(num_weights)}
    return graph if num_ranks == 1 else with_parts(graph, whole_bytes, num_ranks)


def test_buffers_have_room_for_all_parts() -> None:
    graph = parted(num_weights=2, num_ranks=1)
    found = with_parts(graph, {"b0": 300}, 3)
    assert [b.nbytes for b in found.buffers] == [300, 256, 256, 256]
    assert [found.num_parts(b) for b in found.buffers] == [3, 1, 1, 1]
    assert (found.parted, found.num_ranks) == (("b0",), 3)
    assert with_parts(found, {"b0": 300}, 3) is found
    assert with_parts(graph, {}, 3) is graph


def test_a_file_tells_the_parts() -> None:
    graph = parted(num_weights=2)
    assert loads(dumps(graph), TaskGraph) == graph
    assert fingerprint(graph) != fingerprint(parted(num_weights=2, num_ranks=1))


def test_each_rank_has_the_ops_on_its_own_device() -> None:
    device = Symbol("device", "rank:1")
    task = Task(0, "x", args=((device, 3),), kwargs=(("device", device), ("where", "rank:1")))
    graph = replace(parted(num_weights=1), tasks=(task,))
    (moved,) = on_device(graph, "rank:0").tasks
    there = Symbol("device", "rank:0")
    assert moved.args == ((there, 3),)
    assert moved.kwargs == (("device", there), ("where", "rank:1"))
    assert on_device(graph, "cpu") is graph
    host = replace(graph, tasks=(replace(task, args=(Symbol("device", "cpu"),), kwargs=()),))
    assert on_device(host, "rank:0") == host


def test_rows_and_experts_of_a_weight_in_parts_are_not_chosen() -> None:
    """A rank has the rows of its own part, and the choice of one rank is not that of another."""
    draft = Draft()
    numbers = draft.tensor(INPUT, 2, dtype="int64")
    table = draft.tensor(WEIGHT, 16, 8, name="table")
    experts = draft.tensor(WEIGHT, 16, 8, name="experts")
    rows, named = draft.tensor(ACTIVATION, 2, 8), draft.tensor(ACTIVATION, 2, dtype="int64")
    out = draft.tensor(OUTPUT, 2, 8)
    draft.task("aten.embedding.default", table, numbers, out=(rows,))
    draft.task("aten.argmax.default", rows, 1, out=(named,))
    draft.task("aten.index.Tensor", experts, (named,), out=(out,))
    graph = draft.graph((numbers,), (out,))
    whole_bytes = {"table": 512, "experts": 512}
    assert gather_rows(graph) is not graph and list(routes(graph)) == [experts.tensor]
    found = with_parts(graph, whole_bytes, 2)
    assert gather_rows(found) is found
    assert routes(found) == {}
