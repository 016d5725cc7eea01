"""Sorts the weights of a pass by how they can be kept or streamed, and sizes the ring."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.graph.unpacking import unpacked_buffers
from ds_finepage.planning.finepage.small_arena import weights_by_first_use
from ds_finepage.planning.liveness import extent_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.embeddings import looked_up_bytes
from ds_finepage.planning.rewrite.split import (
    Divisible,
    divisible_weights,
    quantum,
)
from ds_finepage.planning.time_bound import end_times_ns

FIXED_SHARE = 0.001
"""Weights up to this share of the largest one that is no embedding table are always kept: norms,
biases."""

RING_SHARE = 0.012
"""Length of the first ring for cut weights, as a share of the bytes that have to be reloaded."""

SLICES_IN_RING = 4
"""A slice in that ring is at most the ring divided by this."""

RING_WEIGHTS = (1, 1.5, 2)
"""Lengths of the ring for whole weights, in units of each of their three largest sizes (output
layer, MLP, attention). A short ring leaves most room; larger weights are kept beside it."""

LARGE_SLICES = ((1, 1), (2, 3), (8, 9))
"""Slices that a ring for few large ones holds, and for how many its length is the best. One slice
needs the fewest copies, and the next copy waits for its task. Many help where some stretches
of a pass use many weights. Slices leave gaps, so the ring is a little longer."""

NEARLY_FULL = 0.5
"""Share of the weights that may be missing if a ring for the largest whole ones is tried."""

SLICES_A_TASK = 1.25
"""Most slices to stream, in units of the tasks, where a longer ring has room."""

ALWAYS_SLICES = 500
"""As many slices are always fine."""

MAX_RUN = 128
"""Most tasks from the first to the last of those that unpack a weight which streams."""


@dataclass(frozen=True, slots=True)
class RingShape:
    """How weights stream through a ring.

    Attributes:
        nbytes: Length of the ring.
        slice_bytes: Most bytes of a slice of a cut weight.
        grain_bytes: Least bytes to stream of a weight that is cut; 0: the same share of all.
        keeps_small: Weights smaller than the grain are kept, if the others have enough bytes.
    """

    nbytes: int
    slice_bytes: int
    grain_bytes: int = 0
    keeps_small: bool = False


@dataclass(frozen=True)
class WeightClasses:
    """The weights of a pass, sorted by how they can be kept or streamed.

    Attributes:
        problem: The pass and its arena.
        sizes: Weight -> bytes of its extent. The scales and minima that are cut with packed numbers
            count with the numbers, and are listed nowhere else.
        order: The weights that may be streamed, by use.
        divisible: The weights that can be cut.
        routed: Weights whose slices (experts) each pass chooses itself.
        fixed_bytes: Bytes of the weights that are always kept.
    """

    problem: Problem
    sizes: dict[int, int]
    order: list[int]
    divisible: dict[int, Divisible]
    routed: frozenset[int]
    fixed_bytes: int

    @classmethod
    def of(cls, problem: Problem, *, may_split: bool) -> WeightClasses:
        """Sort the weights of a pass.

        Args:
            problem: The pass and its arena.
            may_split: Weights may be cut.
        """
        graph = problem.graph
        divisible = {d.buffer: d for d in divisible_weights(graph)} if may_split else {}
        cut_with = {b for d in divisible.values() for b, _ in d.beside}
        order = [b for b in weights_by_first_use(graph) if b not in cut_with]
        sizes = problem.sizes(order)
        for unit in divisible.values():
            sizes[unit.buffer] = sum(problem.size(b) for b, _ in unit.parts)
        times_used = graph.uses
        # Every slice of a product uses the bias, so a streamed bias would block the ring.
        beside = {b for d in divisible.values() for b in graph.paged(graph.tasks[d.task])}
        runs = _used_in_one_run(graph)
        # A table that did not give way to its rows is kept: its lookup would wait for all of it.
        tables = looked_up_bytes(graph)
        small = FIXED_SHARE * max((sizes[b] for b in order if b not in tables), default=0)
        streamable = [
            b
            for b in order
            if b in divisible
            or graph.is_handed(graph.buffers[b])
            or (
                sizes[b] > small
                and b not in beside
                and b not in tables
                and (len(times_used[b]) == 1 or b in runs)
            )
        ]
        return cls(
            problem=problem,
            sizes=sizes,
            order=streamable,
            divisible=divisible,
            routed=frozenset(routes(graph)),
            fixed_bytes=sum(sizes[b] for b in order) - sum(sizes[b] for b in streamable),
        )

    def ring_shapes(self, room: int) -> Iterator[RingShape]:
        """Yield shapes of the ring of every length to try.

        Args:
            room: Bytes of the arena beside the activations.

        Yields:
            Just a ring without bytes if all weights fit into the room.
        """
        missing = self.missing_bytes(room)
        if missing <= 0:
            yield RingShape(0, 0)
            return
        for nbytes in self._ring_lengths(room, missing):
            yield RingShape(nbytes, nbytes // SLICES_IN_RING)
        if self.latency_bytes and not self.problem.shared:
            yield from self._rings_of_rows()
            yield from self._large_rings(room, missing)

    def _ring_lengths(self, room: int, missing: int) -> Iterator[int]:
        """Yield lengths of the ring: for cut weights by bytes, for whole ones by their sizes."""
        if self.divisible:
            # Half of the largest weight is plenty: a plan of whole weights needs more.
            plenty = max(self.sizes[b] for b in self.divisible) // 2
            wanted = min(int(missing * RING_SHARE), plenty)
            nbytes = self.aligned(max(self.least_ring_bytes(), wanted))
            has_room = nbytes + self.fixed_bytes <= room
            yield nbytes if has_room else self.least_ring_bytes()
            return
        for size in sorted({self.sizes[b] for b in self.order})[-3:]:
            yield from (self._whole_ring_bytes(int(factor * size)) for factor in RING_WEIGHTS)

    def _whole_ring_bytes(self, wanted: int) -> int:
        """Return the length of a ring for whole weights, at least that of the longest run."""
        return self.aligned(max(wanted, *self._runs_bytes(set(self.order)), 0))

    def aligned(self, nbytes: int) -> int:
        """Return the bytes of the extent of ``nbytes``."""
        return extent_bytes(nbytes, self.problem.alignment)

    def slice_bytes(self, weight: Divisible, num_rows: int) -> int:
        """Return the bytes of the extents of a slice."""
        return sum(self.aligned(num_rows * row_bytes) for _, row_bytes in weight.parts)

    @cached_property
    def most_whole_bytes(self) -> int:
        """Return the size of the largest weight that streams in one piece."""
        return max((self.sizes[b] for b in self.order if b not in self.divisible), default=0)

    def missing_bytes(self, room: int) -> int:
        """Count the bytes that cannot be kept in ``room`` bytes."""
        return sum(self.sizes[b] for b in self.order) + self.fixed_bytes - room

    def least_ring_bytes(self) -> int:
        """Return the shortest ring through which all streamable weights can go."""
        slices = [self.slice_bytes(d, quantum(d)) for d in self.divisible.values()]
        whole = {b for b in self.order if b not in self.divisible}
        together = [
            [self.sizes[b] for b in self.problem.graph.paged(task) if b in whole]
            for task in self.problem.graph.tasks
        ]
        # If a task needs several weights, the ring may wrap between them; reserve twice their size.
        groups = [sum(sizes) * min(2, len(sizes)) for sizes in together]
        groups += self._runs_bytes(whole)
        return max([2 * max(slices, default=self.aligned(0)), *groups])

    def _runs_bytes(self, whole: set[int], *, wraps: bool = True) -> list[int]:
        """Return the length of a ring for each weight that several tasks use, one after another.

        It holds those of the ``whole`` weights that come while this one is in use, and where it
        ``wraps`` between them, twice their bytes.
        """
        uses, order = self.problem.graph.uses, [b for b in self.order if b in whole]
        firsts = [uses[b][0] for b in order]
        ends = list(accumulate((self.sizes[b] for b in order), initial=0))
        found = []
        for at, buffer in enumerate(order):
            if len(uses[buffer]) > 1:
                behind = bisect_right(firsts, uses[buffer][-1])
                found.append((ends[behind] - ends[at]) * min(1 + wraps, behind - at))
        return found

    @cached_property
    def rows(self) -> list[int]:
        """The buffers of rows of KV caches."""
        graph = self.problem.graph
        return [b for b in self.order if graph.is_handed(graph.buffers[b])]

    @cached_property
    def most_rows_bytes(self) -> int:
        """Return the most bytes of rows that a task of attention reads."""
        return max(self._runs_bytes(set(self.rows), wraps=False), default=0)

    def _rings_of_rows(self) -> Iterator[RingShape]:
        """Yield short rings for the rows of KV caches; weights are kept if they fit.

        One has room for the keys or for the values of a layer, and one for both. They are as long
        as each other, so a ring is never cut where one lies, and the link waits for attention
        alone.
        """
        sizes = [self.sizes[b] for b in self.rows]
        for nbytes in (max(sizes), self.most_rows_bytes) if sizes else ():
            yield RingShape(nbytes, 0, min(sizes), keeps_small=True)

    def _large_rings(self, room: int, missing: int) -> Iterator[RingShape]:
        """Yield shapes of the ring for few large pieces.

        A ring of L bytes holds n slices. It takes L bytes of the room of kept weights, so they are
        reloaded too. The ``missing`` bytes come in n x missing / L copies, and each copy costs the
        link as much as ``latency_bytes`` do. The sum L + n x latency_bytes x missing / L is least
        for L = sqrt(n x latency_bytes x missing). In a small arena a ring takes all the room that
        there is. Small weights stream too, or are kept. Where the link has time to spare, the ring
        for one slice holds four, and moves the fewest bytes.

        Args:
            room: Bytes of the arena beside the activations.
            missing: The bytes that have no room.
        """
        if not self.divisible:
            all_bytes = sum(self.sizes[b] for b in self.order) + self.fixed_bytes
            if self.order and missing <= NEARLY_FULL * all_bytes:
                # Just the largest weights stream, as a whole.
                largest = max(self.sizes[b] for b in self.order)
                yield RingShape(self._whole_ring_bytes(largest), 0, largest, keeps_small=True)
            return
        least, alignment = self.least_ring_bytes(), self.problem.alignment
        most = (room - self.fixed_bytes) // alignment * alignment

        smallest = min(self.sizes[b] for b in self.order)

        def shape(num_slices: int, best_for: int, *, keeps_small: bool) -> RingShape:
            best = self.aligned(int(math.sqrt(best_for * self.latency_bytes * missing)))
            nbytes = max(least, min(most, best))
            grain = nbytes // num_slices
            return RingShape(nbytes, grain, grain, keeps_small and smallest < grain)

        yield shape(4, 1, keeps_small=False)
        for num_slices, best_for in LARGE_SLICES:
            yield shape(num_slices, best_for, keeps_small=True)
            yield shape(num_slices, best_for, keeps_small=False)

    def has_short_slices(self, room: int, ring: RingShape) -> bool:
        """Tell whether the slices in a ring are so short that their number costs time.

        Args:
            room: Bytes of the arena beside the activations.
            ring: The shape of the ring, whose length is part of that room.
        """
        if not self.divisible or self.latency_bytes == 0:
            return False
        if ring.slice_bytes < self.latency_bytes:
            return True
        most = SLICES_A_TASK * len(self.problem.graph.tasks)
        most = max(most, ALWAYS_SLICES)
        return self.missing_bytes(room - ring.nbytes) > ring.slice_bytes * most

    @cached_property
    def pace(self) -> dict[int, int]:
        """Return the time from the use of one streamable weight to that of the next."""
        graph, profile = self.problem.graph, self.problem.profile
        assert profile is not None
        times = end_times_ns(graph, profile)
        waiting, found = set(self.order), {}
        last = 0
        for task in graph.tasks:
            used = [b for b in graph.paged(task) if b in waiting]
            for b in used:
                found[b] = (times[task.index] - last) // len(used)
            if used:
                last = times[task.index]
                waiting.difference_update(used)
        return found

    @property
    def latency_bytes(self) -> float:
        """Return the bytes that the link carries in the latency of the copies of a slice."""
        profile = self.problem.profile
        if profile is None:
            return 0
        num_copies = max((d.num_matrices for d in self.divisible.values()), default=1)
        return num_copies * profile.transfer_latency_ns * profile.h2d_bytes_per_s / 1e9


def _used_in_one_run(graph: TaskGraph) -> frozenset[int]:
    """Return the buffers that are used by unpacking alone, by tasks that are close together."""
    unpacked = unpacked_buffers(graph)
    if not unpacked:
        return frozenset()
    makes = [not unpacked.isdisjoint((*t.writes, *t.touches)) for t in graph.tasks]
    return frozenset(
        b
        for b, found in enumerate(graph.uses)
        if found and found[-1] - found[0] <= MAX_RUN and all(makes[t] for t in found)
    )
