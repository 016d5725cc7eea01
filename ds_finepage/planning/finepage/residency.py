"""Chooses the bytes of the weights that are kept, and cuts the rest for the ring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ds_finepage.graph.memgraph import Extent
from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.finepage.options import DEFAULTS, FinepageOptions
from ds_finepage.planning.finepage.small_arena import weights_by_first_use
from ds_finepage.planning.finepage.stacking import SharedResident
from ds_finepage.planning.liveness import extent_bytes, uses
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.split import Divisible, cut_weights, divisible_weights


@dataclass(frozen=True, slots=True)
class Choice:
    """A taskgraph, cut or not, and a choice of the weights that stream.

    Attributes:
        graph: The taskgraph.
        streamed: The weights that stream, in the order of their use.
        shared: The weights that stay in the extents where the alternating pass keeps them.
    """

    graph: TaskGraph
    streamed: list[int]
    shared: Mapping[int, Extent] = field(default_factory=dict)


@dataclass(frozen=True)
class WeightClasses:
    """The weights of a pass, sorted by how they can be kept or streamed.

    Attributes:
        problem: The pass and its arena.
        options: The heuristics.
        sizes: Weight -> bytes of its extent.
        order: The weights that may be streamed, by use.
        divisible: The weights that can be cut.
        per_call: The weights that each call brings from host memory, so they are always streamed.
        routed: Weights whose slices (experts) each pass chooses itself.
        fixed_bytes: Bytes of the weights that are always kept.
    """

    problem: Problem
    options: FinepageOptions
    sizes: dict[int, int]
    order: list[int]
    divisible: dict[int, Divisible]
    per_call: frozenset[int]
    routed: frozenset[int]
    fixed_bytes: int

    @classmethod
    def of(
        cls, problem: Problem, *, may_split: bool, options: FinepageOptions = DEFAULTS
    ) -> WeightClasses:
        """Sort the weights of a pass.

        Args:
            problem: The pass and its arena.
            may_split: Weights may be cut.
            options: The heuristics.
        """
        graph = problem.graph
        order = weights_by_first_use(graph, per_call=True)
        per_call = frozenset(b for b in order if graph.buffers[b].gather is not None)
        sizes = problem.sizes(order)
        small = options.fixed_share * max(sizes.values(), default=0)
        times_used = uses(graph)
        divisible = {d.buffer: d for d in divisible_weights(graph)} if may_split else {}
        # Every slice of a product uses the bias, so a streamed bias would block the ring.
        beside = {b for d in divisible.values() for b in graph.paged(graph.tasks[d.task])}
        streamable = [
            b
            for b in order
            if b in divisible
            or b in per_call
            or (len(times_used[b]) == 1 and sizes[b] > small and b not in beside)
        ]
        return cls(
            problem=problem,
            options=options,
            sizes=sizes,
            order=streamable,
            divisible=divisible,
            per_call=per_call,
            routed=frozenset(routes(graph)),
            fixed_bytes=sum(sizes[b] for b in order) - sum(sizes[b] for b in streamable),
        )

    def ring_sizes(self, room: int) -> Iterator[int]:
        """Yield lengths of the ring to try.

        Args:
            room: Bytes of the arena beside the activations.

        Yields:
            Just 0 if all weights fit into the room.
        """
        missing = self.missing_bytes(room)
        if missing <= 0:
            yield 0
            return
        least = self.least_ring_bytes()
        if not self.divisible:
            whole = sorted({self.sizes[b] for b in self.order}, reverse=True)[:3]
            factors = self.options.ring_weights
            yield from sorted({self.aligned(int(most * f)) for most in whole for f in factors})
            return
        shares = self.options.ring_shares
        sizes = {self.aligned(max(least, int(missing * f))) for f in shares}
        # Half of the largest weight is plenty: a plan of whole weights needs more.
        plenty = max(self.sizes[b] for b in self.divisible) // 2
        first = self.aligned(max(least, min(int(missing * shares[0]), plenty)))
        yield first
        yield from sorted((sizes | {least}) - {first}, reverse=True)

    def aligned(self, nbytes: int) -> int:
        """Return the bytes of the extent of ``nbytes``."""
        return extent_bytes(nbytes, self.problem.alignment)

    def missing_bytes(self, room: int) -> int:
        """Count the bytes that cannot be kept in ``room`` bytes."""
        missing = sum(self.sizes[b] for b in self.order) + self.fixed_bytes - room
        return max(missing, sum(self.sizes[b] for b in self.per_call))

    def least_ring_bytes(self) -> int:
        """Return the shortest ring through which all streamable weights can go."""
        slices = [_quantum(d) * d.row_bytes for d in self.divisible.values()]
        whole = {b for b in self.order if b not in self.divisible}
        together = [
            [self.sizes[b] for b in self.problem.graph.paged(task) if b in whole]
            for task in self.problem.graph.tasks
        ]
        # If a task needs several weights, the ring may wrap between them; reserve twice their size.
        groups = [sum(sizes) * min(2, len(sizes)) for sizes in together]
        return max([2 * self.aligned(max(slices, default=0)), *groups])

    def choose(self, room: int, ring_bytes: int) -> Choice | None:
        """Choose the weights to keep.

        Args:
            room: Bytes of the arena beside the activations.
            ring_bytes: Length of the ring, part of that room.

        Returns:
            None if the room is too small.
        """
        left = room - self.fixed_bytes - ring_bytes
        if left < 0:
            return None
        if ring_bytes == 0:
            return Choice(self.problem.graph, [])
        always = [b for b in self.order if b not in self.divisible and self.sizes[b] > ring_bytes]
        if not self.per_call.isdisjoint(always):
            return None
        left -= sum(self.sizes[b] for b in always)
        if left < 0:
            return None
        rest = [b for b in self.order if b not in set(always) and b not in self.per_call]
        kept: set[int] = set(always)
        kept_rows: dict[int, int] = {}
        # To keep a byte of an expert saves a share of a byte; any other byte saves all of it.
        for group in (
            [b for b in rest if b not in self.routed],
            [b for b in rest if b in self.routed],
        ):
            left = self._spread(group, left, kept, kept_rows)
        return Choice(*_Slicer(self).cut(kept_rows, kept, ring_bytes))

    def _spread(
        self, weights: list[int], room: int, kept: set[int], kept_rows: dict[int, int]
    ) -> int:
        """Choose bytes to keep of some weights, evenly over their uses.

        Args:
            weights: The weights, by use.
            room: Most bytes to keep.
            kept: Gets the whole weights to keep.
            kept_rows: Gets the rows to keep of each weight that can be cut.

        Returns:
            The room that is left.
        """
        total = sum(self.sizes[b] for b in weights)
        left = room
        due = 0  # bytes still to be kept after rounding, in units of 1/total
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

    def choose_shared(self, lower: int, ring_bytes: int) -> Choice | None:
        """Choose to keep just shared residents, and the weights that cannot stream.

        Args:
            lower: Bytes of the activations.
            ring_bytes: Length of the ring.

        Returns:
            None if the arena is too small.
        """
        top = self.problem.top
        streamable = set(self.order)
        must = {
            b
            for b in self.sizes
            if b not in streamable or (b not in self.divisible and self.sizes[b] > ring_bytes)
        }
        if not self.per_call.isdisjoint(must):
            return None
        names = {
            self.problem.graph.buffers[b].name: b for b in self.sizes if b not in self.per_call
        }
        kept: dict[int, SharedResident] = {}
        need = sum(self.sizes[b] for b in must)
        for piece in self.problem.shared:
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
        cut, streamed = _Slicer(self).cut(rows, must | kept.keys(), ring_bytes)
        extents = {s.buffer.key: s.extent for s in kept.values()}
        return Choice(
            cut,
            streamed,
            {b.id: extents[b.key] for b in cut.buffers if b.key in extents},
        )

    def _can_keep(self, buffer: int, piece: SharedResident) -> bool:
        """Tell whether this pass can keep the alternating pass's piece of a weight."""
        whole = self.problem.graph.buffers[buffer]
        if piece.buffer.offset or piece.buffer.gather is not None or whole.gather is not None:
            return False
        if piece.buffer.nbytes == whole.nbytes:
            return True
        return buffer in self.divisible and not piece.buffer.nbytes % (
            _quantum(self.divisible[buffer]) * self.divisible[buffer].row_bytes
        )


class _Slicer:
    """Cuts the weights that can be cut into a kept part and slices for the ring."""

    def __init__(self, classes: WeightClasses) -> None:
        """Cut weights of one pass."""
        self._classes = classes

    def cut(
        self, kept_rows: dict[int, int], kept: set[int], ring_bytes: int
    ) -> tuple[TaskGraph, list[int]]:
        """Cut all divisible weights after their kept rows; list the weights to stream.

        Args:
            kept_rows: The rows to keep of each weight that can be cut.
            kept: The whole weights to keep.
            ring_bytes: Length of the ring.
        """
        cuts, head = {}, 0
        for buffer in self._classes.order:
            if buffer in kept_rows:
                cuts[buffer], head = self._slices(
                    self._classes.divisible[buffer], kept_rows[buffer], head, ring_bytes
                )
            elif buffer not in kept:
                head = self._classes.sizes[buffer] + (
                    head if head + self._classes.sizes[buffer] <= ring_bytes else 0
                )
        cut = cut_weights(self._classes.problem.graph, cuts)
        return cut, self._streamed(cut, kept - kept_rows.keys(), kept_rows)

    def _slices(
        self, weight: Divisible, kept_rows: int, head: int, ring_bytes: int
    ) -> tuple[list[int], int]:
        """Cut a weight into the kept part and slices for the ring.

        A slice ends at the end of the ring, so that no bytes of the ring are left empty.

        Args:
            weight: The weight.
            kept_rows: Its rows that are kept.
            head: Offset in the ring of the first slice.
            ring_bytes: Length of the ring.

        Returns:
            The rows at which the slices begin, and the offset in the ring of the next slice.
        """
        quantum = _quantum(weight)
        most = (
            ring_bytes
            // self._classes.options.slices_in_ring
            // weight.row_bytes
            // quantum
            * quantum
        )
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
            head += self._classes.aligned(num_rows * weight.row_bytes)
        return starts or [0], head

    def _streamed(self, cut: TaskGraph, kept: set[int], kept_rows: dict[int, int]) -> list[int]:
        """List the weights and slices of the cut graph that stream, by use."""
        kept_bytes = {
            self._classes.problem.graph.buffers[b].name: rows * self._classes.divisible[b].row_bytes
            for b, rows in kept_rows.items()
        }
        may_stream = set(self._classes.order)
        found = []
        for buffer in weights_by_first_use(cut, per_call=True):
            part = cut.buffers[buffer]
            if part.name in kept_bytes:
                if part.offset >= kept_bytes[part.name]:
                    found.append(buffer)
            elif buffer in may_stream and buffer not in kept:
                found.append(buffer)
        return found


def _quantum(weight: Divisible) -> int:
    """Return the rows that are cut together, so that a slice is a good shape for a kernel."""
    return 64 if weight.num_rows >= 1024 else 16 if weight.num_rows >= 128 else 1
