"""Plans with three regions: activations, a ring of streamed weights, resident weights.

    0 ......... activations ......... ring ......... residents ......... arena end

Activations are placed offline. Streamed weights follow each other through the ring, first in, first
out, so reload k waits for nothing but the task that used the bytes a ring's length earlier: the
transfer lane runs as far ahead as the ring is long. Residents never move, and are given from
outside. Every pass begins and ends with just the residents in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from ds_finepage.graph.memgraph import Extent, MemGraph, Residency
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.builder import MemGraphBuilder
from ds_finepage.planning.layout import LiveBuffer, Tenancy, place
from ds_finepage.planning.liveness import aligned, uses


def place_activations(graph: TaskGraph, alignment: int) -> dict[int, Extent]:
    """Place all activations by their live ranges.

    The rows of an embedding are placed among them, as live from the start of the pass: each call
    brings others, so they are neither kept nor part of the stream.
    """
    live = []
    for buffer, found in zip(graph.buffers, uses(graph), strict=True):
        is_gathered = buffer.gather is not None and not graph.is_handed(buffer)
        if found and (is_gathered or buffer.kind is BufferKind.ACTIVATION):
            begin = 0 if is_gathered else found[0]
            live.append(LiveBuffer(buffer.id, aligned(buffer.nbytes, alignment), begin, found[-1]))
    return place(live)


class Ring:
    """Extents given out first in, first out, within ``[base, base + nbytes)``."""

    def __init__(self, base: int, nbytes: int) -> None:
        """Start empty."""
        self._base, self._nbytes = base, nbytes
        self._head = 0
        self._live: deque[tuple[int, Extent]] = deque()

    def take(self, buffer: int, nbytes: int) -> Extent | None:
        """Return the next extent, or None while the bytes that come next are in use."""
        if nbytes > self._nbytes:
            return None
        offset = self._head if self._head + nbytes <= self._nbytes else 0
        found = Extent(self._base + offset, nbytes)
        if any(found.overlaps(extent) for _, extent in self._live):
            return None
        # The bytes that are skipped at the end count as in use until the head has passed them:
        # what lies there is older than what lies at the start, and goes first anyway.
        self._live.append((buffer, found))
        self._head = offset + nbytes
        return found

    def give_back(self, buffer: int) -> None:
        """Take an extent back; buffers may leave out of order when a task uses several."""
        self._live = deque(item for item in self._live if item[0] != buffer)


class StreamPlanner:
    """Writes the memgraph of one pass for a given set of streamed weights.

    Invariant: streamed weights are reloaded in the order of their use, none before the one in
    front of it.
    """

    def __init__(
        self,
        graph: TaskGraph,
        *,
        arena_bytes: int,
        alignment: int,
        streamed: Sequence[int],
        activations: dict[int, Extent],
        activation_bytes: int,
        ring_bytes: int,
        residents: Mapping[int, Extent],
    ) -> None:
        """Lay the regions out.

        Args:
            graph: The pass.
            arena_bytes: Size of the arena.
            alignment: Of extents, in bytes.
            streamed: Weights to stream, in the order of their use; each is used by one task.
            activations: Where the activations lie, from offset 0.
            activation_bytes: Size of their region.
            ring_bytes: Size of the ring.
            residents: Where the weights lie that are kept, between the ring and the arena's end.
        """
        self._graph, self._alignment = graph, alignment
        self._waiting = deque(streamed)
        self._streamed = frozenset(streamed)
        self._residents = residents
        self._activations = activations
        self._ring = Ring(activation_bytes, ring_bytes)
        self._tenancy = Tenancy()
        self._builder = MemGraphBuilder(graph, "finepage", arena_bytes, alignment)
        self._last_use = [found[-1] if found else -1 for found in uses(graph)]
        self._lower_bytes = activation_bytes + ring_bytes

    def plan(self) -> MemGraph | None:
        """Write the memgraph; None where residents or a streamed weight do not fit."""
        if any(extent.offset < self._lower_bytes for extent in self._residents.values()):
            return None
        self._builder.begin(tuple(Residency(b, e) for b, e in sorted(self._residents.items())))
        for rows in self._graph.buffers:
            if rows.gather is not None and rows.id in self._activations:
                self._alloc(rows.id, self._activations[rows.id])
                self._builder.reload(rows.id)
        for task in self._graph.tasks:
            for buffer in self._graph.paged(task):
                if buffer in self._activations and self._builder.states[buffer].extent is None:
                    self._alloc(buffer, self._activations[buffer])
            self._reload_ahead()
            for buffer in self._graph.paged(task):
                if self._builder.states[buffer].extent is None:
                    return None  # the ring is too small for what this task needs at once
            self._builder.compute(task)
            for buffer in self._graph.paged(task):
                if self._last_use[buffer] == task.index:
                    self._drop(buffer)
        return self._builder.finish()

    def _alloc(self, buffer: int, extent: Extent) -> None:
        self._builder.alloc(buffer, extent, self._tenancy.vacators(extent))

    def _reload_ahead(self) -> None:
        """Bring in as many of the next streamed weights as the ring has room for."""
        while self._waiting:
            buffer = self._waiting[0]
            extent = self._ring.take(
                buffer, aligned(self._graph.buffers[buffer].nbytes, self._alignment)
            )
            if extent is None:
                return
            self._waiting.popleft()
            self._alloc(buffer, extent)
            self._builder.reload(buffer)

    def _drop(self, buffer: int) -> None:
        if buffer in self._streamed:
            self._ring.give_back(buffer)
        elif buffer not in self._activations:
            return  # resident
        extent = self._builder.states[buffer].extent
        assert extent is not None
        self._tenancy.free(extent, self._builder.drop(buffer))
