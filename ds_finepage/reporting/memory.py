"""Device memory of a plan over time, by kind of bytes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ds_finepage.graph.memgraph import EdgeKind, Lane, MemGraph, Node, NodeKind
from ds_finepage.graph.taskgraph import BufferKind
from ds_finepage.graph.timeline import Timeline


class MemoryKind(str, enum.Enum):
    """Device bytes by their purpose, in the order in which pictures stack them."""

    RESIDENT = "resident weights"
    STREAMED = "streamed weights"
    KV = "KV cache"
    ACTIVATION = "activations"
    WORKSPACE = "workspace"
    OTHER = "inputs and outputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySeries:
    """Device bytes by kind, one value of each kind at each position.

    Attributes:
        at: Nanoseconds since the pass began; ascending. A value holds until the next position.
        nbytes: The bytes of each kind.
    """

    at: tuple[int, ...]
    nbytes: dict[MemoryKind, tuple[int, ...]]

    @property
    def peak_bytes(self) -> int:
        """The most bytes of all kinds together."""
        return max(map(sum, zip(*self.nbytes.values(), strict=True)), default=0)


def memory_over_time(memgraph: MemGraph, timeline: Timeline) -> MemorySeries:
    """Return the bytes at each moment of a pass.

    An extent counts from the completion of its alloc to that of its drop or offload. A weight that
    is resident when the pass begins counts from the start. A drop happens where the plan has it, or
    earlier if its bytes are used again by then.

    Args:
        memgraph: The plan.
        timeline: A timeline of it, predicted or measured.
    """
    kinds = _kinds(memgraph)
    complete = _completions(memgraph, timeline)
    changes: list[tuple[int, int, MemoryKind, int]] = []  # time, node, kind, bytes
    for node in memgraph.nodes:
        if change := change_at(node):
            assert node.buffer is not None
            when = 0 if node.kind is NodeKind.RESIDENT else complete[node.id]
            changes.append((when, node.id, kinds[node.buffer], change))
    for span in timeline.spans:
        task = memgraph.nodes[span.node].task
        if task is not None and (nbytes := memgraph.graph.tasks[task].workspace_bytes):
            changes.append((span.start_ns, span.node, MemoryKind.WORKSPACE, nbytes))
            changes.append((span.end_ns, span.node, MemoryKind.WORKSPACE, -nbytes))
    now = _outside_arena(memgraph)
    at, rows = [0], [dict(now)]
    for when, _, kind, change in sorted(changes, key=lambda change: change[:2]):
        now[kind] += change
        if when > at[-1]:
            at.append(when)
            rows.append(dict(now))
        rows[-1] = dict(now)
    if timeline.total_ns > at[-1]:
        at.append(timeline.total_ns)
        rows.append(dict(now))
    return MemorySeries(at=tuple(at), nbytes={k: tuple(r[k] for r in rows) for k in MemoryKind})


def stalls(timeline: Timeline) -> list[tuple[int, int]]:
    """Return when the compute lane waits, from the start to its last task, in nanoseconds."""
    found, free = [], 0
    computing = (s for s in timeline.spans if s.lane is Lane.COMPUTE)
    for span in sorted(computing, key=lambda span: span.start_ns):
        if span.start_ns > free:
            found.append((free, span.start_ns))
        free = max(free, span.end_ns)
    return found


def _completions(memgraph: MemGraph, timeline: Timeline) -> list[int]:
    """Return when each node is complete; one without a span is as soon as its predecessors are."""
    ends = {span.node: span.end_ns for span in timeline.spans}
    complete: list[int] = []
    drops: dict[int, int] = {}  # the end of the last task before each drop
    computed = 0
    for node, before in zip(memgraph.nodes, memgraph.predecessors, strict=True):
        ready = max((complete[b] for b in before), default=0)
        complete.append(ends.get(node.id, ready))
        if node.kind is NodeKind.COMPUTE:
            computed = max(computed, complete[-1])
        elif node.kind is NodeKind.DROP:
            drops[node.id] = computed
    for edge in memgraph.edges:
        if edge.kind is EdgeKind.MEMORY and edge.before in drops:
            drops[edge.before] = min(drops[edge.before], complete[edge.after])
    for node_id, end in drops.items():
        complete[node_id] = max(complete[node_id], end)
    return complete


def change_at(node: Node) -> int:
    """Return the bytes that a node takes in the arena; less than 0 where it gives them back."""
    if node.extent is None:
        return 0
    if node.kind in (NodeKind.RESIDENT, NodeKind.ALLOC):
        return node.extent.nbytes
    return -node.extent.nbytes if node.kind in (NodeKind.DROP, NodeKind.OFFLOAD) else 0


def _kinds(memgraph: MemGraph) -> list[MemoryKind]:
    resident = {residency.buffer for residency in memgraph.entry} - {*memgraph.lost}

    by_kind = {
        BufferKind.STATE: MemoryKind.KV,
        BufferKind.WEIGHT: MemoryKind.STREAMED,
        BufferKind.ACTIVATION: MemoryKind.ACTIVATION,
    }
    found = [by_kind.get(buffer.kind, MemoryKind.OTHER) for buffer in memgraph.graph.buffers]
    for buffer in memgraph.graph.buffers:
        if memgraph.graph.is_handed(buffer):
            found[buffer.id] = MemoryKind.KV
        elif buffer.id in resident:
            found[buffer.id] = MemoryKind.RESIDENT
    return found


def _outside_arena(memgraph: MemGraph) -> dict[MemoryKind, int]:
    """Return the bytes that are on the device during the whole pass, but not in the arena."""
    found = dict.fromkeys(MemoryKind, 0)
    for buffer, kind in zip(memgraph.graph.buffers, _kinds(memgraph), strict=True):
        if not (buffer.kind.is_paged or buffer.kind.is_on_host):
            found[kind] += buffer.nbytes
    return found
