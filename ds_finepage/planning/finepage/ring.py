"""Plans with three regions: activations, a ring of streamed weights, resident weights.

    0 ......... activations ......... ring ......... residents ......... arena end

Activations are placed offline. Streamed weights go through the ring first in, first out. A reload
waits only for the task that used its bytes one ring's length earlier, so the transfer lane runs as
far ahead as the ring is long. Residents never move. Every pass begins and ends with just the
residents in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from ds_finepage.graph.memgraph import Extent, MemGraph, Residency
from ds_finepage.graph.taskgraph import BufferKind
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
    graph, live = problem.graph, []
    for buffer, found in zip(graph.buffers, graph.uses, strict=True):
        is_gathered = buffer.gather is not None and not graph.is_handed(buffer)
        if found and (is_gathered or buffer.kind is BufferKind.ACTIVATION):
            begin = 0 if is_gathered else found[0]
            end = (held or {}).get(buffer.id, found[-1])
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

    def take_ahead(
        self, waiting: deque[int], size: Callable[[int], int]
    ) -> Iterator[tuple[int, Extent]]:
        """Take as many of the waiting buffers as there is room for; yield each with its extent."""
        while waiting:
            extent = self.take(waiting[0], size(waiting[0]))
            if extent is None:
                return
            yield waiting.popleft(), extent

    def give_back(self, buffer: int) -> None:
        """Take an extent back. A task that uses several buffers may give them back in any order."""
        self._live = deque(item for item in self._live if item[0] != buffer)


def write_plan(
    problem: Problem,
    *,
    streamed: Sequence[int],
    activations: Mapping[int, Extent],
    ring_bytes: int,
    residents: Mapping[int, Extent],
) -> MemGraph | None:
    """Write the memgraph of one pass for a given set of streamed weights.

    Args:
        problem: The pass, in which each streamed weight is used by one task, and its arena.
        streamed: Weights to stream, in the order of their use, in which they are reloaded.
        activations: The extents of the activations, from offset 0.
        ring_bytes: Length of the ring.
        residents: The extents of the kept weights, between the ring and the arena's end.

    Returns:
        None if residents or a streamed weight do not fit.
    """
    graph, base = problem.graph, top_of(activations)
    if any(extent.offset < base + ring_bytes for extent in residents.values()):
        return None
    builder = MemGraphBuilder(graph, "finepage", problem.arena_bytes, problem.alignment)
    ring, tenancy, waiting = Ring(base, ring_bytes), Tenancy(), deque(streamed)

    def alloc(buffer: int, extent: Extent) -> None:
        builder.alloc(buffer, extent, tenancy.vacators(extent))

    builder.begin(tuple(Residency(b, e) for b, e in sorted(residents.items())))
    for rows in graph.buffers:
        if rows.gather is not None and rows.id in activations:
            alloc(rows.id, activations[rows.id])
            builder.reload(rows.id)
    for task in graph.tasks:
        paged = graph.paged(task)
        for buffer in paged:
            if buffer in activations and builder.states[buffer].extent is None:
                alloc(buffer, activations[buffer])
        for buffer, extent in ring.take_ahead(waiting, problem.size):
            alloc(buffer, extent)
            builder.reload(buffer)
        if None in [builder.states[buffer].extent for buffer in paged]:
            return None  # the ring is too small for what this task needs at once
        builder.compute(task)
        for buffer in paged:
            held = builder.states[buffer].extent
            assert held is not None
            if graph.uses[buffer][-1] == task.index and buffer not in residents:
                if buffer not in activations:
                    ring.give_back(buffer)
                tenancy.free(held, builder.drop(buffer))
    return builder.finish()
