"""Which bytes of the weights are kept, and how the rest is cut for the ring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ds_finepage.graph.memgraph import Extent
from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.finepage.small_arena import FIXED_SHARE, weights_by_first_use
from ds_finepage.planning.finepage.stacking import SharedResident
from ds_finepage.planning.liveness import aligned, uses
from ds_finepage.planning.rewrite.split import Divisible, cut_weights, divisible_weights

RING_SHARES = (0.012, 0.018, 0.006, 0.03)
"""Lengths of the ring to try, as shares of the bytes that have to be reloaded."""

RING_WEIGHTS = (1.0, 2.0, 1.5, 3.0, 4.0)
"""Lengths of the ring to try where whole weights go through it, in units of the largest."""

SLICES_IN_RING = 4


@dataclass(frozen=True, slots=True)
class Chosen:
    """A taskgraph, cut or not, with the weights to stream in the order of their use."""

    graph: TaskGraph
    streamed: list[int]
    shared: Mapping[int, Extent] = field(default_factory=dict)  # kept, at these places


@dataclass(frozen=True)
class Shares:
    """The weights of a pass, by what can be done with them. Sizes are aligned."""

    graph: TaskGraph
    alignment: int
    sizes: dict[int, int]
    order: list[int]  # that may be streamed, by use
    divisible: dict[int, Divisible]
    handed: frozenset[int]  # that each call brings anew, and so are always streamed
    routed: frozenset[int]  # of which each pass chooses the slices that it uses
    fixed_bytes: int  # of the others, which are always kept

    @classmethod
    def of(cls, graph: TaskGraph, alignment: int, *, may_split: bool) -> Shares:
        """Sort the weights of a pass."""
        order = weights_by_first_use(graph, handed=True)
        handed = frozenset(b for b in order if graph.buffers[b].gather is not None)
        sizes = {b: aligned(graph.buffers[b].nbytes, alignment) for b in order}
        largest = max(sizes.values(), default=0)
        times_used = uses(graph)
        divisible = {d.buffer: d for d in divisible_weights(graph)} if may_split else {}
        # A bias would be used by every slice, and stand in the way of those behind it.
        shared = {b for d in divisible.values() for b in graph.paged(graph.tasks[d.task])}
        streamable = [
            b
            for b in order
            if b in divisible
            or b in handed
            or (len(times_used[b]) == 1 and sizes[b] > FIXED_SHARE * largest and b not in shared)
        ]
        return cls(
            graph=graph,
            alignment=alignment,
            sizes=sizes,
            order=streamable,
            divisible=divisible,
            handed=handed,
            routed=frozenset(routes(graph)),
            fixed_bytes=sum(sizes[b] for b in order) - sum(sizes[b] for b in streamable),
        )

    def ring_sizes(self, room: int) -> Iterator[int]:
        """Yield lengths of the ring to try, 0 first where everything fits."""
        missing = self.missing_bytes(room)
        if missing <= 0:
            yield 0
            return
        least = self.least_ring_bytes()
        if not self.divisible:
            whole = sorted({self.sizes[b] for b in self.order}, reverse=True)[:3]
            sizes = {aligned(int(most * f), self.alignment) for most in whole for f in RING_WEIGHTS}
            yield from sorted(sizes)
            return
        sizes = {aligned(max(least, int(missing * f)), self.alignment) for f in RING_SHARES}
        # Half of the largest weight is plenty, and less than who never cuts has to keep free.
        plenty = max(self.sizes[b] for b in self.divisible) // 2
        share = min(int(missing * RING_SHARES[0]), plenty)
        first = aligned(max(least, share), self.alignment)
        yield first
        yield from sorted((sizes | {least}) - {first}, reverse=True)

    def missing_bytes(self, room: int) -> int:
        """Count the bytes that cannot all be kept in ``room``."""
        missing = sum(self.sizes[b] for b in self.order) + self.fixed_bytes - room
        return max(missing, sum(self.sizes[b] for b in self.handed))

    def least_ring_bytes(self) -> int:
        """Return the shortest ring through which all weights that may be streamed can go."""
        slices = [_quantum(d) * d.row_bytes for d in self.divisible.values()]
        whole = {b for b in self.order if b not in self.divisible}
        together = [
            [self.sizes[b] for b in self.graph.paged(task) if b in whole]
            for task in self.graph.tasks
        ]
        # Of several that one task needs, the first may lie so that the next has to begin anew.
        groups = [sum(sizes) * min(2, len(sizes)) for sizes in together]
        return max([2 * aligned(max(slices, default=0), self.alignment), *groups])

    def choose(self, room: int, ring_bytes: int) -> Chosen | None:
        """Choose what is kept in ``room`` beside a ring; None where that cannot be done."""
        left = room - self.fixed_bytes - ring_bytes
        if left < 0:
            return None
        if ring_bytes == 0:
            return Chosen(self.graph, [])
        always = [b for b in self.order if b not in self.divisible and self.sizes[b] > ring_bytes]
        if not self.handed.isdisjoint(always):
            return None
        left -= sum(self.sizes[b] for b in always)
        if left < 0:
            return None
        rest = [b for b in self.order if b not in set(always) and b not in self.handed]
        kept: set[int] = set(always)
        kept_rows: dict[int, int] = {}
        # A byte of experts that is kept saves a share of a byte, any other saves all of it.
        for group in (
            [b for b in rest if b not in self.routed],
            [b for b in rest if b in self.routed],
        ):
            left = self._spread(group, left, kept, kept_rows)
        return Chosen(*self._cut(kept_rows, kept, ring_bytes))

    def _spread(
        self, weights: list[int], room: int, kept: set[int], kept_rows: dict[int, int]
    ) -> int:
        """Choose what is kept of some weights, evenly over their uses; return the room left."""
        total = sum(self.sizes[b] for b in weights)
        left = room
        due = 0  # bytes to keep that rounding has left over, in units of 1/total
        for buffer in weights:
            due += self.sizes[buffer] * min(room, total)
            if buffer in self.divisible:
                weight = self.divisible[buffer]
                unit = _quantum(weight) * weight.row_bytes * total
                rows = max(0, min(due // unit * _quantum(weight), weight.num_rows))
                due -= rows * weight.row_bytes * total
                left -= rows * weight.row_bytes
                kept_rows[buffer] = rows
            elif due >= self.sizes[buffer] * total:
                due -= self.sizes[buffer] * total
                left -= self.sizes[buffer]
                kept.add(buffer)
        return left

    def choose_shared(
        self, shared: Sequence[SharedResident], lower: int, ring_bytes: int, top: int
    ) -> Chosen | None:
        """Choose to keep just what stands above activations and ring, and what must be kept.

        Args:
            shared: What there is to keep, uppermost first.
            lower: Bytes of the activations.
            ring_bytes: Size of the ring.
            top: Upper end of the arena.

        Returns:
            None where it cannot be done.
        """
        streamable = set(self.order)
        must = {
            b
            for b in self.sizes
            if b not in streamable or (b not in self.divisible and self.sizes[b] > ring_bytes)
        }
        if not self.handed.isdisjoint(must):
            return None
        names = {self.graph.buffers[b].name: b for b in self.sizes if b not in self.handed}
        kept: dict[int, SharedResident] = {}
        need = sum(self.sizes[b] for b in must)
        for piece in shared:
            buffer = names.get(piece.buffer.name)
            if buffer is None or not self._can_keep(buffer, piece):
                continue
            still = need - self.sizes[buffer] if buffer in must else need
            if piece.extent.offset - still < lower + ring_bytes:
                break
            kept[buffer], need, top = piece, still, piece.extent.offset
        if top - need < lower + ring_bytes:
            return None
        rows = {
            b: kept[b].buffer.nbytes // self.divisible[b].row_bytes if b in kept else 0
            for b in self.order
            if b in self.divisible
        }
        cut, streamed = self._cut(rows, must | kept.keys(), ring_bytes)
        extents = {s.buffer.key: s.extent for s in kept.values()}
        return Chosen(
            cut,
            streamed,
            {b.id: extents[b.key] for b in cut.buffers if b.key in extents},
        )

    def _can_keep(self, buffer: int, piece: SharedResident) -> bool:
        """Tell whether another pass's piece of a weight is one that this pass can keep."""
        whole = self.graph.buffers[buffer]
        if piece.buffer.offset or piece.buffer.gather is not None or whole.gather is not None:
            return False
        if piece.buffer.nbytes == whole.nbytes:
            return True
        return buffer in self.divisible and not piece.buffer.nbytes % (
            _quantum(self.divisible[buffer]) * self.divisible[buffer].row_bytes
        )

    def _cut(
        self, kept_rows: dict[int, int], kept: set[int], ring_bytes: int
    ) -> tuple[TaskGraph, list[int]]:
        """Cut all divisible weights, each behind the rows of it that are kept."""
        cuts, head = {}, 0
        for buffer in self.order:
            if buffer in kept_rows:
                cuts[buffer], head = self._slices(
                    self.divisible[buffer], kept_rows[buffer], head, ring_bytes
                )
            elif buffer not in kept:
                head = self.sizes[buffer] + (head if head + self.sizes[buffer] <= ring_bytes else 0)
        cut = cut_weights(self.graph, cuts)
        return cut, self._streamed(cut, kept - kept_rows.keys(), kept_rows)

    def _slices(
        self, weight: Divisible, kept_rows: int, head: int, ring_bytes: int
    ) -> tuple[list[int], int]:
        """Cut a weight into the part that is kept and slices for the ring.

        A slice ends where the ring does, so that nothing of the ring is left empty.

        Returns:
            The rows at which the slices begin, and where in the ring the next one will lie.
        """
        quantum = _quantum(weight)
        most = ring_bytes // SLICES_IN_RING // weight.row_bytes // quantum * quantum
        starts = [0] if kept_rows else []
        at = kept_rows
        while at < weight.num_rows:
            space = (ring_bytes - head) // weight.row_bytes // quantum * quantum
            if space <= 0 < head:
                head = 0
                continue
            starts.append(at)
            num_rows = min(weight.num_rows - at, max(quantum, min(most, space)))
            at += num_rows
            head += aligned(num_rows * weight.row_bytes, self.alignment)
        return starts or [0], head

    def _streamed(self, cut: TaskGraph, kept: set[int], kept_rows: dict[int, int]) -> list[int]:
        """List the weights and slices of the cut graph that are to be streamed, by use."""
        kept_bytes = {
            self.graph.buffers[b].name: rows * self.divisible[b].row_bytes
            for b, rows in kept_rows.items()
        }
        may_stream = set(self.order)
        found = []
        for buffer in weights_by_first_use(cut, handed=True):
            part = cut.buffers[buffer]
            if part.name in kept_bytes:
                if part.offset >= kept_bytes[part.name]:
                    found.append(buffer)
            elif buffer in may_stream and buffer not in kept:
                found.append(buffer)
        return found


def _quantum(weight: Divisible) -> int:
    """Rows that are cut together, so that what is left is still a good shape for a kernel."""
    return 64 if weight.num_rows >= 1024 else 16 if weight.num_rows >= 128 else 1
