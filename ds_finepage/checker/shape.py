"""The checker's first step: ids, fields and edges, without their meaning."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ds_finepage.checker.faults import Fault, Violation
from ds_finepage.graph.memgraph import Edge, MemGraph, NodeKind
from ds_finepage.graph.taskgraph import Buffer, BufferKind, TaskGraph


def shape_violations(memgraph: MemGraph) -> list[Violation]:
    """List what is wrong with ids, fields and edges."""
    found = list(_taskgraph_shape(memgraph.graph))
    if memgraph.alignment < 1:
        found.append(
            Violation(Fault.ALIGNMENT, None, f"alignment is {memgraph.alignment}; it must be >= 1")
        )
    return [*found, *_node_shape(memgraph), *_edge_shape(memgraph)]


def _taskgraph_shape(graph: TaskGraph) -> Iterator[Violation]:
    wrong = partial(Violation, Fault.TASKGRAPH, None)
    for position, buffer in enumerate(graph.buffers):
        if buffer.id != position:
            yield wrong(f"buffer at position {position} has id {buffer.id}")
        if buffer.nbytes < 0:
            yield wrong(f"buffer {buffer.id} has {buffer.nbytes} bytes")
    yield from map(wrong, _broken_rows(graph))
    for position, task in enumerate(graph.tasks):
        if task.index != position:
            yield wrong(f"task at position {position} has index {task.index}")
        for ids, changes in ((task.reads, False), (task.writes, True), (task.touches, True)):
            if list(ids) != sorted(set(ids)):
                yield wrong(f"{task.where}: buffers {ids} are not sorted or repeat")
            for b in ids:
                if not 0 <= b < len(graph.buffers):
                    yield wrong(f"{task.where}: buffer {b} is outside 0..{len(graph.buffers) - 1}")
                elif changes and _is_fixed(graph, graph.buffers[b]):
                    text = f"{task.where} changes {title_of(graph, b)}; weights are read-only"
                    yield Violation(Fault.WEIGHT_WRITTEN, None, text)


def _is_fixed(graph: TaskGraph, buffer: Buffer) -> bool:
    is_weight = buffer.kind in (BufferKind.WEIGHT, BufferKind.MASTER)
    return is_weight and not graph.is_handed(buffer)


def _broken_rows(graph: TaskGraph) -> Iterator[str]:
    """Name the slices of experts that do not hold the same rows of every matrix."""
    for buffer in graph.buffers:
        experts = graph.experts_by_name.get(buffer.name)
        if experts is None or buffer.kind is not BufferKind.WEIGHT:
            continue
        end, num = buffer.offset + buffer.nbytes, max(1, experts.num_matrices)
        if buffer.offset % num or buffer.nbytes % num or end > experts.nbytes:
            rows = f"the same rows of {experts.num_matrices} matrices"
            yield f"{title_of(graph, buffer.id)} does not hold {rows}"


def _node_shape(memgraph: MemGraph) -> Iterator[Violation]:
    num_buffers, num_tasks = len(memgraph.graph.buffers), len(memgraph.graph.tasks)
    for position, node in enumerate(memgraph.nodes):
        if node.id != position:
            text = f"node at position {position} has id {node.id}"
            yield Violation(Fault.NODE_ID, position, text)
        wrong = partial(Violation, Fault.NODE_FIELDS, position)
        computes = node.kind is NodeKind.COMPUTE
        for what, is_set, wanted in (
            ("task", node.task is not None, computes),
            ("buffer", node.buffer is not None, not computes),
            ("extent", node.extent is not None, not computes),
        ):
            if is_set != wanted:
                has = "lacks" if wanted else "has"
                yield wrong(f"node {position} ({node.kind.value}) {has} {what}")
        for what, number, end in (
            ("task", node.task, num_tasks),
            ("buffer", node.buffer, num_buffers),
        ):
            if number is not None and not 0 <= number < end:
                yield wrong(f"node {position}: {what} {number} is outside 0..{end - 1}")


def _edge_shape(memgraph: MemGraph) -> Iterator[Violation]:
    def wrong(fault: Fault, edge: Edge, text: str) -> Violation:
        named = f"edge {edge.before} -> {edge.after} ({edge.kind.value}) {text}"
        return Violation(fault, None if fault is Fault.EDGE_RANGE else edge.after, named)

    previous, num_nodes = None, len(memgraph.nodes)
    for edge in memgraph.edges:
        if not (0 <= edge.before < num_nodes and 0 <= edge.after < num_nodes):
            yield wrong(Fault.EDGE_RANGE, edge, f"names a node outside 0..{num_nodes - 1}")
        elif edge.before >= edge.after:
            yield wrong(Fault.EDGE_BACKWARD, edge, "does not point forward")
        if previous is not None and edge == previous:
            yield wrong(Fault.EDGE_REPEATED, edge, "is there twice")
        elif previous is not None and edge < previous:
            yield wrong(Fault.EDGE_UNSORTED, edge, "is out of order")
        previous = edge


def title_of(graph: TaskGraph, buffer: int) -> str:
    """Return a buffer as a message names it."""
    b = graph.buffers[buffer]
    return f"{b.kind.value} {buffer}" + (f" ({b.name})" if b.name else "")
