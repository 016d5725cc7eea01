"""Plans with three regions: activations, a ring of streamed weights, resident weights.

    0 ......... activations ......... ring ......... residents ......... arena end

Activations are placed offline. Streamed weights go through the ring first in, first out. A reload
waits only for the task that used its bytes one ring's length earlier, so the transfer lane runs as
far ahead as the ring is long. Residents never move. Every pass begins and ends with just the
residents in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from ds_finepage.graph.memgraph import Extent, MemGraph, Residency
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.builder import MemGraphBuilder
from ds_finepage.planning.finepage.held_rows import Held
from ds_finepage.planning.layout import LiveBuffer, Tenancy, place, top_of
from ds_finepage.planning.problem import Problem


def place_activations(problem: Problem, held: Held | None = None) -> dict[int, Extent]:
    """Place all activations by their live ranges.

    The rows of an embedding are placed among them, live from the start of the pass. They differ in
    each call, so they are neither kept nor streamed.

    Args:
        problem: The pass.
        held: The activations whose bytes stay taken after their last use.

    Returns:
        Buffer -> extent.
    """
    held = held or {}
    key = ("activations", problem.alignment, *held.items())
    return problem.once(key, lambda graph: _placed(problem, graph, held))


def _placed(problem: Problem, graph: TaskGraph, held: Held) -> dict[int, Extent]:
    live = []
    for buffer, found in zip(graph.buffers, graph.uses, strict=True):
        is_gathered = buffer.gather is not None and not graph.is_handed(buffer)
        if found and (is_gathered or buffer.kind is BufferKind.ACTIVATION):
            begin = 0 if is_gathered else found[0]
            end = held.get(buffer.id, found[-1])
            live.append(LiveBuffer(buffer.id, problem.size(buffer.id), begin, end))
    return place(live)


class Ring:
    """Gives out extents first in, first out, within ``[base, base + nbytes)``."""

    def __init__(self, base: int, nbytes: int) -> None:
        """Start empty."""
        self._base, self._nbytes = base, nbytes
        self._head = 0
        self._live: deque[tuple[int, Extent]] = deque()

    def take(self, buffer: int, nbytes: int) -> Extent | None:
        """Return the next extent; None while its bytes are in use, or if it exceeds the ring."""
        if nbytes > self._nbytes:
            return None
        offset = self._head if self._head + nbytes <= self._nbytes else 0
        found = Extent(self._base + offset, nbytes)
        for _, extent in self._live:  # ``any`` of a generator takes twice the time
            if found.overlaps(extent):
                return None
        # Bytes that are skipped at the end count as in use until the head has passed them. The
        # extents there are older than those at the start, so they are given back first anyway.
        self._live.append((buffer, found))
        self._head = offset + nbytes
        return found

    def give_back(self, buffer: int) -> None:
        """Take an extent back. A task that uses several buffers may give them back in any order."""
        self._live = deque(item for item in self._live if item[0] != buffer)


class StreamPlanner:
    """Writes the memgraph of one pass for a given set of streamed weights.

    Invariant: streamed weights are reloaded in the order of their use.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        streamed: Sequence[int],
        activations: dict[int, Extent],
        ring_bytes: int,
        residents: Mapping[int, Extent],
    ) -> None:
        """Lay the regions out.

        Args:
            problem: The pass, in which each streamed weight is used by one task, and its arena.
            streamed: Weights to stream, in the order of their use.
            activations: The extents of the activations, from offset 0.
            ring_bytes: Length of the ring.
            residents: The extents of the kept weights, between the ring and the arena's end.
        """
        self._graph, self._size = problem.graph, problem.size
        self._waiting = deque(streamed)
        self._streamed = frozenset(streamed)
        self._residents = residents
        self._activations = activations
        self._ring = Ring(top_of(activations), ring_bytes)
        self._tenancy = Tenancy()
        self._builder = MemGraphBuilder(
            problem.graph, "finepage", problem.arena_bytes, problem.alignment
        )
        self._last_use = [found[-1] if found else -1 for found in problem.graph.uses]
        self._lower_bytes = top_of(activations) + ring_bytes

    def plan(self) -> MemGraph | None:
        """Write the memgraph; None if residents or a streamed weight do not fit."""
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
        """Reload as many of the next streamed weights as the ring has room for."""
        while self._waiting:
            buffer = self._waiting[0]
            extent = self._ring.take(buffer, self._size(buffer))
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
