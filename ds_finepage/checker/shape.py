"""The checker's first step: ids, fields and edges, without their meaning."""

from __future__ import annotations

from collections.abc import Iterator

from ds_finepage.checker.faults import Fault, Violation
from ds_finepage.graph.memgraph import MemGraph, NodeKind
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph


def shape_violations(memgraph: MemGraph) -> list[Violation]:
    """List what is wrong with ids, fields and edges."""
    found = _taskgraph_shape(memgraph.graph)
    if memgraph.alignment < 1:
        found.append(
            Violation(Fault.ALIGNMENT, None, f"alignment is {memgraph.alignment}; it must be >= 1")
        )
    found += _node_shape(memgraph)
    found += _edge_shape(memgraph)
    return found


def _taskgraph_shape(graph: TaskGraph) -> list[Violation]:
    found: list[Violation] = []

    def wrong(message: str) -> None:
        found.append(Violation(Fault.TASKGRAPH, None, message))

    for position, buffer in enumerate(graph.buffers):
        if buffer.id != position:
            wrong(f"buffer at position {position} has id {buffer.id}")
        if buffer.nbytes < 0:
            wrong(f"buffer {buffer.id} has {buffer.nbytes} bytes")
    for text in _broken_rows(graph):
        wrong(text)
    for position, task in enumerate(graph.tasks):
        if task.index != position:
            wrong(f"task at position {position} has index {task.index}")
        for ids, changes in ((task.reads, False), (task.writes, True), (task.touches, True)):
            if list(ids) != sorted(set(ids)):
                wrong(f"{task.where}: buffers {ids} are not sorted or repeat")
            for b in ids:
                if not 0 <= b < len(graph.buffers):
                    wrong(f"{task.where}: buffer {b} is outside 0..{len(graph.buffers) - 1}")
                elif changes and graph.buffers[b].kind is BufferKind.WEIGHT:
                    text = f"{task.where} changes {title_of(graph, b)}; weights are read-only"
                    found.append(Violation(Fault.WEIGHT_WRITTEN, None, text))
    return found


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


def _node_shape(memgraph: MemGraph) -> list[Violation]:
    found: list[Violation] = []
    num_buffers, num_tasks = len(memgraph.graph.buffers), len(memgraph.graph.tasks)
    for position, node in enumerate(memgraph.nodes):
        if node.id != position:
            text = f"node at position {position} has id {node.id}"
            found.append(Violation(Fault.NODE_ID, position, text))
        computes = node.kind is NodeKind.COMPUTE
        for what, is_set, wanted in (
            ("task", node.task is not None, computes),
            ("buffer", node.buffer is not None, not computes),
            ("extent", node.extent is not None, not computes),
        ):
            if is_set != wanted:
                text = f"node {position} ({node.kind.value}) {'lacks' if wanted else 'has'} {what}"
                found.append(Violation(Fault.NODE_FIELDS, position, text))
        if node.task is not None and not 0 <= node.task < num_tasks:
            text = f"node {position}: task {node.task} is outside 0..{num_tasks - 1}"
            found.append(Violation(Fault.NODE_FIELDS, position, text))
        if node.buffer is not None and not 0 <= node.buffer < num_buffers:
            text = f"node {position}: buffer {node.buffer} is outside 0..{num_buffers - 1}"
            found.append(Violation(Fault.NODE_FIELDS, position, text))
    return found


def _edge_shape(memgraph: MemGraph) -> list[Violation]:
    found: list[Violation] = []
    previous = None
    for edge in memgraph.edges:
        text = f"edge {edge.before} -> {edge.after} ({edge.kind.value})"
        if not (0 <= edge.before < len(memgraph.nodes) and 0 <= edge.after < len(memgraph.nodes)):
            text += f" names a node outside 0..{len(memgraph.nodes) - 1}"
            found.append(Violation(Fault.EDGE_RANGE, None, text))
        elif edge.before >= edge.after:
            text += " does not point forward"
            found.append(Violation(Fault.EDGE_BACKWARD, edge.after, text))
        if previous is not None and edge == previous:
            found.append(Violation(Fault.EDGE_REPEATED, edge.after, text + " is there twice"))
        elif previous is not None and edge < previous:
            found.append(Violation(Fault.EDGE_UNSORTED, edge.after, text + " is out of order"))
        previous = edge
    return found


def title_of(graph: TaskGraph, buffer: int) -> str:
    """Return a buffer as a message names it."""
    b = graph.buffers[buffer]
    return f"{b.kind.value} {buffer}" + (f" ({b.name})" if b.name else "")
