"""A model in layers as a taskgraph, for the tests of policies that go by modules."""

from __future__ import annotations

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import EdgeKind, MemGraph, NodeKind
from ds_finepage.graph.taskgraph import (
    Buffer,
    BufferKind,
    GraphInput,
    GraphOutput,
    Ref,
    Task,
    TaskGraph,
    TensorView,
)

UNIT = 64
CARD = HardwareProfile(
    name="one byte a nanosecond",
    source="made up",
    capacity_bytes=1 << 40,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e9,
    memory_bytes_per_s=1e9,
    flops_per_s={"default": 1e9},
)


def layered(
    num_layers: int, *, weights_a_layer: int = 2, task_ns: int = 10, is_tied: bool = False
) -> TaskGraph:
    """Build embed, then layers of linear modules, then head; every buffer but one is a unit.

    Each linear reads its weight and the activation before it and makes the next. Each layer reads
    and changes a KV cache. ``is_tied``: the head reads the embedding's weight.
    """
    names = ["embed"]
    names += [f"layers.{i}.lin{j}" for i in range(num_layers) for j in range(weights_a_layer)]
    names += ["head"]
    buffers: list[Buffer] = []

    def new(kind: BufferKind, name: str) -> int:
        buffers.append(Buffer(len(buffers), kind, UNIT, name))
        return len(buffers) - 1

    weights = {name: new(BufferKind.WEIGHT, f"{name}.weight") for name in names if name != "head"}
    weights["head"] = weights["embed"] if is_tied else new(BufferKind.WEIGHT, "head.weight")
    caches = [new(BufferKind.STATE, f"cache.{i}") for i in range(num_layers)]
    ids = new(BufferKind.INPUT, "ids")
    before, tasks = ids, []
    for name in names:
        kind = BufferKind.OUTPUT if name == "head" else BufferKind.ACTIVATION
        made = new(kind, f"out of {name}")
        cache = [caches[int(name.split(".")[1])]] if name.startswith("layers") else []
        tasks.append(
            Task(
                len(tasks),
                "test.linear",
                name,
                args=(Ref(weights[name]), (Ref(before), None, 1)),
                results=(made,),
                reads=tuple(sorted({weights[name], before, *cache})),
                writes=tuple(sorted({made, *cache})),
                time_ns=task_ns,
            )
        )
        before = made
    return TaskGraph(
        "layered",
        tuple(buffers),
        tuple(TensorView(b.id, b.id, "float32", (UNIT // 4,), (1,)) for b in buffers),
        tuple(tasks),
        inputs=tuple(
            GraphInput(position, buffer)
            for position, buffer in enumerate([*weights.values(), *caches, ids])
        ),
        outputs=(GraphOutput(tensor=before), GraphOutput(position=0)),
    )


def awaited(memgraph: MemGraph) -> list[tuple[str, str]]:
    """List each task that a reload waits for by a wait of the system, and that reload's weight."""
    nodes, graph = memgraph.nodes, memgraph.graph
    found = []
    for edge in memgraph.edges:
        before, after = nodes[edge.before], nodes[edge.after]
        if edge.kind is EdgeKind.SYNC and after.kind is NodeKind.RELOAD:
            assert before.task is not None and after.buffer is not None
            weight = graph.buffers[after.buffer].name.removesuffix(".weight")
            found.append((graph.tasks[before.task].label, weight))
    return found


def moved(memgraph: MemGraph, *kinds: NodeKind) -> list[str]:
    """Name what nodes of some kinds do to weights, and all tasks, in the order of the nodes."""
    found = []
    for node in memgraph.nodes:
        if node.kind is NodeKind.COMPUTE:
            assert node.task is not None
            found.append(memgraph.graph.tasks[node.task].label)
        elif node.kind in kinds:
            assert node.buffer is not None
            buffer = memgraph.graph.buffers[node.buffer]
            if buffer.kind is BufferKind.WEIGHT:
                found.append(f"{node.kind.value} {buffer.name.removesuffix('.weight')}")
    return found
