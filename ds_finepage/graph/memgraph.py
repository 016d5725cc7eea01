"""The memgraph: a taskgraph with addresses, transfers and memory dependencies.

Every execution order that obeys the edges computes the right results within ``arena_bytes``. A
policy writes it, the checker verifies it, the simulator and the executor read it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from pydantic import NonNegativeInt

from ds_finepage.graph.routes import Route, routes
from ds_finepage.graph.taskgraph import TO_HOST, TaskGraph


class NodeKind(str, enum.Enum):
    """The step that a node of the memgraph stands for."""

    RESIDENT = "resident"  # the buffer is in its extent when the pass begins
    ALLOC = "alloc"  # the buffer owns its extent from here on
    RELOAD = "reload"  # host -> extent; of a parted weight, this rank's part
    COLLECT = "collect"  # the parts of the other ranks -> extent
    COMPUTE = "compute"  # run one task
    OFFLOAD = "offload"  # extent -> host, then free
    DROP = "drop"  # free without a copy


class Lane(str, enum.Enum):
    """Where a node runs. Each lane runs its nodes in the order of their ids."""

    COMPUTE = "compute"
    H2D = "h2d"
    D2H = "d2h"
    RANKS = "ranks"  # collects; all ranks run them in the same order
    DISK = "disk"  # file -> extent, in pieces over host memory
    HOST = "host"  # tasks that the host computes; their activations come down and go up


LANE_OF: dict[NodeKind, Lane] = {
    NodeKind.RELOAD: Lane.H2D,
    NodeKind.COLLECT: Lane.RANKS,
    NodeKind.COMPUTE: Lane.COMPUTE,
    NodeKind.OFFLOAD: Lane.D2H,
}
"""Nodes of other kinds take no time and run nowhere."""


PUBLISHED = "horizon-published"
"""The policy that copies weights to host memory although the host has them."""


class EdgeKind(str, enum.Enum):
    """Why a node must wait for another. The first seven are the published ones."""

    DATA = "data"  # consumer after the node that holds the buffer
    ALLOC = "alloc"  # alloc before the first writer, or before the reload
    MEMORY = "memory"  # vacator of the bytes before the alloc that uses them again
    READ_DROP = "read_drop"  # all readers before the drop
    USE_OFFLOAD = "use_offload"  # the holder and all users since then before the offload
    # Offload before the reload; a buffer has one host slot, so also that reload before the next
    # offload. The host masters of weights are there when the pass begins.
    STORE_RELOAD = "store_reload"
    JOIN = "join"  # all touches before the join
    ORDER = "order"  # readers of the old contents before a task that changes them in place
    SYNC = "sync"  # not needed for right results: a simulated baseline waits there


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """``[offset, offset + nbytes)`` in an arena; both in bytes."""

    offset: NonNegativeInt
    nbytes: NonNegativeInt

    @property
    def end(self) -> int:
        """The first byte after the extent."""
        return self.offset + self.nbytes

    def overlaps(self, other: Extent) -> bool:
        """Tell whether at least one byte is in both."""
        return self.offset < other.end and other.offset < self.end


@dataclass(frozen=True, slots=True)
class Node:
    """One node. ``extent`` is set on RESIDENT, ALLOC, RELOAD, COLLECT, OFFLOAD and DROP.

    Invariant: ``id`` is the position in ``MemGraph.nodes``; ids are a topological order.
    """

    id: NonNegativeInt
    kind: NodeKind
    buffer: NonNegativeInt | None = None  # None on COMPUTE
    task: NonNegativeInt | None = None  # set on COMPUTE
    extent: Extent | None = None


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """``after`` starts after ``before`` ends."""

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

    Invariant: edges are sorted, point from lower to higher ids, and do not repeat. ``entry`` and
    ``exit`` list weights only. ``host_slots`` gives every offloaded buffer one offset in the pinned
    pool for the whole pass. ``routed`` is sorted; it lists the weights with one reload that brings
    in only the slices that the pass uses. ``filed`` is sorted; it lists the weights that lie in
    files and have no copy in host memory.
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
    filed: tuple[NonNegativeInt, ...] = ()

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each node: the ids of the nodes that it waits for, sorted."""
        before: list[list[int]] = [[] for _ in self.nodes]
        for edge in self.edges:
            if not before[edge.after] or before[edge.after][-1] != edge.before:
                before[edge.after].append(edge.before)
        return tuple(tuple(sorted(set(ids))) for ids in before)

    @cached_property
    def placements(self) -> dict[int, dict[int, Extent]]:
        """For each COMPUTE node, by id: the extent of each paged buffer of its task.

        This follows the nodes in the order of their ids, so the memgraph must pass the checker.
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
    def used(self) -> tuple[Extent, ...]:
        """The bytes of the arena that the plan uses at any time, by offset."""
        found: list[Extent] = []
        extents = (node.extent for node in self.nodes if node.extent is not None)
        for extent in sorted(extents, key=attrgetter("offset")):
            if found and extent.offset <= found[-1].end:
                last = found.pop()
                extent = Extent(last.offset, max(last.end, extent.end) - last.offset)
            found.append(extent)
        return tuple(found)

    @cached_property
    def in_files(self) -> frozenset[int]:
        """The same as ``filed``."""
        return frozenset(self.filed)

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

    def lane_of(self, node: Node) -> Lane | None:
        """Return the lane that a node runs in; None if it takes no time.

        A task that copies to host memory, or that the host computes, runs beside the others.
        """
        if node.task in self.graph.host_tasks:
            return Lane.HOST
        if node.task is not None and self.graph.tasks[node.task].op == TO_HOST:
            return Lane.D2H
        if node.kind is NodeKind.RELOAD and node.buffer in self.in_files:
            return Lane.DISK
        return LANE_OF.get(node.kind)

    def bytes_at(self, node: Node) -> int:
        """Return the bytes that a node moves or frees; for a routed reload, the most it may.

        A rank reloads its own part of a parted weight, and collects those of the others. A task
        that copies to host memory moves its results.
        """
        if node.task is not None:
            return sum(self.graph.buffers[b].nbytes for b in self.graph.tasks[node.task].writes)
        assert node.buffer is not None
        nbytes = self.graph.buffers[node.buffer].nbytes
        part_bytes = nbytes // self.graph.num_parts(self.graph.buffers[node.buffer])
        if node.kind is NodeKind.COLLECT:
            return nbytes - part_bytes
        if node.kind is NodeKind.RELOAD:
            nbytes = part_bytes
        route = self.routed_reloads.get(node.id)
        return nbytes if route is None else route.most_bytes(nbytes)

    @property
    def file_bytes(self) -> int:
        """Bytes that a pass reads from files if it finds ``entry`` in place."""
        return sum(self.bytes_at(n) for n in self.nodes if self.lane_of(n) is Lane.DISK)

    def copies_at(self, node: Node) -> int:
        """Return the number of copies of a reload; for a routed reload, the most it may need."""
        assert node.buffer is not None
        num_pieces = self.graph.num_pieces(self.graph.buffers[node.buffer])
        route = self.routed_reloads.get(node.id)
        if route is None:
            return num_pieces
        # Adjacent slices of a whole weight come in by one copy.
        gaps = route.num_slices - route.most_used
        return route.most_used if num_pieces > 1 else min(route.most_used, gaps + 1)

    def bytes_of(self, kind: NodeKind) -> int:
        """Return the bytes that all nodes of one kind move or free in a pass."""
        return sum(self.bytes_at(n) for n in self.nodes if n.kind is kind and n.buffer is not None)

    @property
    def lost(self) -> list[int]:
        """The weights that a pass finds and does not leave, because its policy never settles."""
        left = set(self.exit)
        return [r.buffer for r in self.entry if r not in left]

    @property
    def reloaded_bytes(self) -> int:
        """Bytes copied host -> device in a pass that finds ``entry`` in place."""
        return self.bytes_of(NodeKind.RELOAD)

    @property
    def steady_reloaded_bytes(self) -> int:
        """The same, and the weights that it does not leave: those come back before the next."""
        return self.reloaded_bytes + sum(self.graph.buffers[b].nbytes for b in self.lost)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes copied device -> host in a pass."""
        return self.bytes_of(NodeKind.OFFLOAD)

    @cached_property
    def peak_bytes(self) -> int:
        """The largest end of any extent in the arena."""
        return max((n.extent.end for n in self.nodes if n.extent is not None), default=0)


def lane_of_late(memgraph: MemGraph, node: Node) -> Lane:
    """Return the lane of a RESIDENT node whose weight is not in place, and is reloaded first.

    A node of a parted weight also collects the parts of the other ranks, in their lane.
    """
    assert node.buffer is not None
    if node.buffer in memgraph.in_files:
        return Lane.DISK
    is_parted = memgraph.graph.num_parts(memgraph.graph.buffers[node.buffer]) > 1
    return Lane.RANKS if is_parted else Lane.H2D
