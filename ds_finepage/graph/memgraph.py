"""The memgraph: a taskgraph with addresses, transfers and memory dependencies.

Any execution order that obeys the edges computes the right thing within ``arena_bytes``. Written
by a policy, verified by the checker, read by the simulator and the executor.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property

from pydantic import NonNegativeInt

from ds_finepage.graph.routes import Route, routes
from ds_finepage.graph.taskgraph import TaskGraph


class NodeKind(str, enum.Enum):
    """What a node of the memgraph does."""

    RESIDENT = "resident"  # in its extent when the pass begins
    STORED = "stored"  # in host memory when the pass begins
    ALLOC = "alloc"  # the buffer owns its extent from here on
    RELOAD = "reload"  # host -> extent
    COMPUTE = "compute"  # run one task
    OFFLOAD = "offload"  # extent -> host, then free
    DROP = "drop"  # free without a copy


class Lane(str, enum.Enum):
    """Where a node runs. Each lane runs its nodes in the order of their ids."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"


LANE_OF: dict[NodeKind, Lane] = {
    NodeKind.RELOAD: Lane.H2D,
    NodeKind.COMPUTE: Lane.COMPUTE,
    NodeKind.OFFLOAD: Lane.D2H,
}
"""Nodes of other kinds take no time and run nowhere."""


class EdgeKind(str, enum.Enum):
    """Why a node must wait for another. The first seven are the published ones."""

    DATA = "data"  # consumer after the node that holds the buffer
    ALLOC = "alloc"  # alloc before the first writer, or before the reload
    MEMORY = "memory"  # vacator of the bytes before the alloc that uses them again
    READ_DROP = "read_drop"  # every reader before the drop
    USE_OFFLOAD = "use_offload"  # every user since it became resident, and the holder, before it
    STORE_RELOAD = "store_reload"  # offload (or stored) before the reload; and, as a buffer has
    # one host slot, that reload before the next offload
    JOIN = "join"  # every touch before the join
    ORDER = "order"  # readers of the old contents before a task that changes them in place
    SYNC = "sync"  # not needed to be right: the system that is simulated waits there


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """``[offset, offset + nbytes)`` in an arena; both in bytes."""

    offset: NonNegativeInt
    nbytes: NonNegativeInt

    @property
    def end(self) -> int:
        """First byte behind the extent."""
        return self.offset + self.nbytes

    def overlaps(self, other: Extent) -> bool:
        """True where at least one byte is in both."""
        return self.offset < other.end and other.offset < self.end


@dataclass(frozen=True, slots=True)
class Node:
    """One node. ``extent`` is set on RESIDENT, ALLOC, RELOAD, OFFLOAD and DROP.

    Invariant: ``id`` is the position in ``MemGraph.nodes``; ids are a topological order.
    """

    id: NonNegativeInt
    kind: NodeKind
    buffer: NonNegativeInt | None = None  # None on COMPUTE
    task: NonNegativeInt | None = None  # set on COMPUTE
    extent: Extent | None = None


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """``after`` starts when ``before`` is complete."""

    before: NonNegativeInt
    after: NonNegativeInt
    kind: EdgeKind


@dataclass(frozen=True, slots=True)
class Residency:
    """A buffer that is valid in an extent between two passes."""

    buffer: NonNegativeInt
    extent: Extent


@dataclass(frozen=True)
class MemGraph:
    """A plan: nodes, edges, and what is resident before and after the pass.

    Invariant: edges are sorted, point from lower to higher ids and are free of repeats. ``exit``
    lists weights only, as does ``entry``. ``host_slots`` gives every offloaded buffer the one
    offset in the pinned pool that it has for the whole pass. ``routed`` lists the weights, sorted,
    of which the one reload brings in just the slices that the pass uses.
    """

    graph: TaskGraph
    policy: str
    arena_bytes: NonNegativeInt
    alignment: NonNegativeInt
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    entry: tuple[Residency, ...]
    exit: tuple[Residency, ...]
    host_slots: tuple[tuple[NonNegativeInt, NonNegativeInt], ...] = ()  # (buffer, offset in bytes)
    host_bytes: NonNegativeInt = 0
    routed: tuple[NonNegativeInt, ...] = ()

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """Ids that each node waits for, sorted."""
        before: list[list[int]] = [[] for _ in self.nodes]
        for edge in self.edges:
            if not before[edge.after] or before[edge.after][-1] != edge.before:
                before[edge.after].append(edge.before)
        return tuple(tuple(sorted(set(ids))) for ids in before)

    @cached_property
    def placements(self) -> dict[int, dict[int, Extent]]:
        """For each COMPUTE node, by id: where each paged buffer of its task lies.

        Follows the nodes in the order of their ids, so it means what it says only for a memgraph
        that passes the checker.
        """
        where: dict[int, Extent] = {}
        found: dict[int, dict[int, Extent]] = {}
        for node in self.nodes:
            if node.kind in (NodeKind.RESIDENT, NodeKind.ALLOC):
                assert node.buffer is not None and node.extent is not None
                where[node.buffer] = node.extent
            elif node.kind is NodeKind.COMPUTE:
                assert node.task is not None
                task = self.graph.tasks[node.task]
                found[node.id] = {b: where[b] for b in self.graph.paged(task) if b in where}
        return found

    @cached_property
    def routed_reloads(self) -> dict[int, Route]:
        """The RELOAD nodes, by id, of the weights in ``routed``."""
        if not self.routed:
            return {}
        known = routes(self.graph)
        wanted = {b: known[b] for b in self.routed if b in known}
        return {
            n.id: wanted[n.buffer]
            for n in self.nodes
            if n.kind is NodeKind.RELOAD and n.buffer in wanted
        }

    def bytes_at(self, node: Node) -> int:
        """Bytes that a node moves or frees; of slices that a pass chooses, as many as may be."""
        assert node.buffer is not None
        nbytes = self.graph.buffers[node.buffer].nbytes
        route = self.routed_reloads.get(node.id)
        return nbytes if route is None else route.most_bytes(nbytes)

    def bytes_of(self, kind: NodeKind) -> int:
        """Bytes that all nodes of one kind move or free in a pass."""
        return sum(self.bytes_at(n) for n in self.nodes if n.kind is kind and n.buffer is not None)

    @property
    def reloaded_bytes(self) -> int:
        """Bytes copied host -> device in a pass that finds ``entry`` in place."""
        return self.bytes_of(NodeKind.RELOAD)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes copied device -> host in a pass."""
        return self.bytes_of(NodeKind.OFFLOAD)

    @cached_property
    def peak_bytes(self) -> int:
        """Highest arena byte that any extent reaches."""
        return max((n.extent.end for n in self.nodes if n.extent is not None), default=0)
