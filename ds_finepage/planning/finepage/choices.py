"""Chooses the bytes of the weights that are kept, and cuts the rest for the ring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from ds_finepage.graph.memgraph import Extent
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.finepage.grains import stream_in_grains
from ds_finepage.planning.finepage.residency import RingShape, WeightClasses
from ds_finepage.planning.finepage.small_arena import weights_by_first_use
from ds_finepage.planning.finepage.stacking import SharedResident
from ds_finepage.planning.rewrite.split import Divisible, cut_weights, quantum


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


class Chooser:
    """Chooses weights to keep, by the room that the arena has."""

    def __init__(self, weights: WeightClasses) -> None:
        """Choose among the weights of one pass."""
        self._weights = weights

    def choose(self, room: int, ring: RingShape) -> Choice | None:
        """Choose the weights to keep, and cut the others; beside shared residents keep no others.

        Args:
            room: Bytes of the arena beside the activations.
            ring: The shape of the ring, whose length is part of that room.

        Returns:
            None if the room is too small.
        """
        weights = self._weights
        if weights.problem.shared:
            return self._choose_shared(weights.problem.arena_bytes - room, ring)
        left = room - weights.fixed_bytes - ring.nbytes
        if left < 0:
            return None
        if ring.nbytes == 0:
            return Choice(weights.problem.graph, [])
        always = {b for b in weights.order if self._exceeds(b, ring.nbytes)}
        if ring.nbytes < weights.most_rows_bytes:
            always.update(weights.rows[::2])  # a task of attention reads no two that stream
        left -= sum(weights.sizes[b] for b in always)
        if left < 0:
            return None
        rest = [b for b in weights.order if b not in always]
        kept = always
        kept_rows: dict[int, int] = {}
        # To keep a byte of an expert saves a share of a byte; any other byte saves all of it.
        for group in (
            [b for b in rest if b not in weights.routed],
            [b for b in rest if b in weights.routed],
        ):
            if ring.grain_bytes:
                left = self._stream_in_grains(group, left, ring, kept, kept_rows)
            else:
                left = self._spread(group, left, kept, kept_rows)
        return self._cut(kept_rows, kept, ring)

    def _exceeds(self, buffer: int, ring_bytes: int) -> bool:
        """Tell whether a weight can go through the ring neither whole nor cut."""
        weights = self._weights
        return buffer not in weights.divisible and weights.sizes[buffer] > ring_bytes

    def _spread(
        self, weights: list[int], room: int, kept: set[int], kept_rows: dict[int, int]
    ) -> int:
        """Keep bytes of weights evenly over their uses; return the room that is left.

        The ring is empty when a pass begins, so of whole weights the first are kept.
        """
        total = sum(self._weights.sizes[b] for b in weights)
        left, streams_none = room, True
        due = 0  # bytes still to be kept after rounding, in units of 1/total
        for buffer in weights:
            due += self._weights.sizes[buffer] * min(room, total)
            if buffer in self._weights.divisible:
                weight = self._weights.divisible[buffer]
                unit = quantum(weight) * weight.row_bytes * total
                most = left // (unit // total) * quantum(weight)
                rows = max(0, min(due // unit * quantum(weight), weight.num_rows, most))
                due -= rows * weight.row_bytes * total
                left -= rows * weight.row_bytes
                kept_rows[buffer] = rows
            elif self._weights.sizes[buffer] <= left and (
                due >= self._weights.sizes[buffer] * total or (streams_none and due > 0)
            ):
                due -= self._weights.sizes[buffer] * total
                left -= self._weights.sizes[buffer]
                kept.add(buffer)
            else:
                streams_none = False
        return left

    def _stream_in_grains(
        self,
        weights: list[int],
        room: int,
        ring: RingShape,
        kept: set[int],
        kept_rows: dict[int, int],
    ) -> int:
        """Do the same as :meth:`_spread`, but stream at least a grain of a weight, or nothing."""
        sizes, divisible = self._weights.sizes, self._weights.divisible
        total = sum(sizes[b] for b in weights)
        streamed = stream_in_grains(
            weights,
            sizes,
            divisible,
            total - room,
            ring.grain_bytes,
            pace=self._weights.pace,
            keeps_small=ring.keeps_small,
        )
        for buffer, nbytes in streamed.items():
            if buffer in divisible:
                weight = divisible[buffer]
                # Extents are longer than rows, so all bytes may be a little more than all rows.
                kept_rows[buffer] = max(0, weight.num_rows - nbytes // weight.row_bytes)
            elif not nbytes:
                kept.add(buffer)
        return room - (total - sum(streamed.values()))

    def _choose_shared(self, lower: int, ring: RingShape) -> Choice | None:
        """Keep just shared residents, and weights that cannot stream, above ``lower`` bytes."""
        weights = self._weights
        top = weights.problem.top
        streamable = set(weights.order)
        must = {b for b in weights.sizes if b not in streamable or self._exceeds(b, ring.nbytes)}
        names = {weights.problem.graph.buffers[b].name: b for b in weights.sizes}
        kept: dict[int, list[SharedResident]] = {}
        need = sum(weights.sizes[b] for b in must)
        for pieces in _units_of(weights):
            buffer = names.get(pieces[0].buffer.name)
            if buffer is None or not _can_keep(weights, buffer, pieces):
                continue
            still = need - weights.sizes[buffer] if buffer in must else need
            offset = min(piece.extent.offset for piece in pieces)
            if offset - still < lower + ring.nbytes:
                break
            kept[buffer], need, top = pieces, still, offset
        if top - need < lower + ring.nbytes:
            return None
        rows = {
            b: kept[b][0].buffer.nbytes // weights.divisible[b].parts[0][1] if b in kept else 0
            for b in weights.order
            if b in weights.divisible
        }
        found = self._cut(rows, must | kept.keys(), ring)
        extents = {s.buffer.key: s.extent for pieces in kept.values() for s in pieces}
        cut = found.graph.buffers
        return replace(found, shared={b.id: extents[b.key] for b in cut if b.key in extents})

    def _cut(self, kept_rows: Mapping[int, int], kept: Set[int], ring: RingShape) -> Choice:
        """Cut the weights that can be cut into their kept rows and slices for the ring."""
        weights, starts, head = self._weights, dict[int, list[int]](), 0
        for buffer in weights.order:
            if buffer in kept_rows:
                starts[buffer], head = self._slices(
                    weights.divisible[buffer], kept_rows[buffer], head, ring
                )
            elif buffer not in kept:
                size = weights.sizes[buffer]
                head = size + (head if head + size <= ring.nbytes else 0)
        cut = cut_weights(weights.problem.graph, starts, weights.divisible.values())
        return Choice(cut, self._streamed(cut, kept - kept_rows.keys(), kept_rows))

    def _slices(
        self, weight: Divisible, kept_rows: int, head: int, ring: RingShape
    ) -> tuple[list[int], int]:
        """Cut a weight into the kept part and slices for the ring, the first of them at ``head``.

        A slice ends at the end of the ring, so that no bytes of the ring are left empty. Returned
        are the rows at which slices begin, and the offset in the ring of the next slice.
        """
        unit = quantum(weight)
        most = ring.slice_bytes // weight.row_bytes // unit * unit
        starts = [0] if kept_rows else []
        at = kept_rows
        while at < weight.num_rows:
            space = (ring.nbytes - head) // weight.row_bytes // unit * unit
            if ring.grain_bytes and space < min(most, weight.num_rows - at):
                space = 0
            if space <= 0 < head:
                head = 0
                continue
            starts.append(at)
            num_rows = min(weight.num_rows - at, max(unit, min(most, space)))
            at += num_rows
            head += self._weights.slice_bytes(weight, num_rows)
        return starts or [0], head

    def _streamed(self, cut: TaskGraph, kept: Set[int], kept_rows: Mapping[int, int]) -> list[int]:
        """List the weights and slices of the cut graph that stream, by use."""
        kept_bytes = {
            self._weights.problem.graph.buffers[b].name: rows * row_bytes
            for unit, rows in kept_rows.items()
            for b, row_bytes in self._weights.divisible[unit].parts
        }
        may_stream = set(self._weights.order)
        found = []
        for buffer in weights_by_first_use(cut):
            part = cut.buffers[buffer]
            if part.name in kept_bytes:
                if part.offset >= kept_bytes[part.name]:
                    found.append(buffer)
            elif buffer in may_stream and buffer not in kept:
                found.append(buffer)
        return found


def _units_of(weights: WeightClasses) -> Iterator[list[SharedResident]]:
    """Yield shared residents one by one, those of a unit together where its last one comes."""
    graph = weights.problem.graph
    units = {
        graph.buffers[b].name: [graph.buffers[part].name for part, _ in unit.parts]
        for unit in weights.divisible.values()
        for b, _ in unit.parts
    }
    seen: dict[str, SharedResident] = {}
    for piece in weights.problem.shared:
        names = units.get(piece.buffer.name, [piece.buffer.name])
        seen[piece.buffer.name] = piece
        if all(name in seen for name in names):
            yield [seen.pop(name) for name in names]


def _can_keep(weights: WeightClasses, buffer: int, pieces: Sequence[SharedResident]) -> bool:
    """Tell whether this pass can keep the alternating pass's pieces of a weight."""
    graph, unit = weights.problem.graph, weights.divisible.get(buffer)
    if any(p.buffer.offset for p in pieces):
        return False
    if unit is None:
        return pieces[0].buffer.nbytes == graph.buffers[buffer].nbytes
    rows = {
        p.buffer.nbytes / row_bytes for p, (_, row_bytes) in zip(pieces, unit.parts, strict=True)
    }
    return len(rows) == 1 and (rows == {unit.num_rows} or not min(rows) % quantum(unit))
