"""Cuts weights into a kept part and slices for the ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.finepage.residency import RingShape, WeightClasses
from ds_finepage.planning.finepage.small_arena import weights_by_first_use
from ds_finepage.planning.rewrite.split import Divisible, cut_weights, quantum


class Slicer:
    """Cuts the weights that can be cut into a kept part and slices for the ring."""

    def __init__(self, weights: WeightClasses) -> None:
        """Cut weights of one pass."""
        self._weights = weights

    def starts(
        self, kept_rows: Mapping[int, int], kept: Set[int], ring: RingShape
    ) -> dict[int, list[int]]:
        """Choose where all divisible weights are cut after their kept rows.

        Args:
            kept_rows: The rows to keep of each weight that can be cut.
            kept: The whole weights to keep.
            ring: The shape of the ring.

        Returns:
            Weight -> the rows at which its slices begin; the kept rows are a slice too.
        """
        cuts, head = {}, 0
        for buffer in self._weights.order:
            if buffer in kept_rows:
                cuts[buffer], head = self._slices(
                    self._weights.divisible[buffer], kept_rows[buffer], head, ring
                )
            elif buffer not in kept:
                head = self._weights.sizes[buffer] + (
                    head if head + self._weights.sizes[buffer] <= ring.nbytes else 0
                )
        return cuts

    def cut(
        self, starts: Mapping[int, Sequence[int]], kept_rows: Mapping[int, int], kept: Set[int]
    ) -> tuple[TaskGraph, list[int]]:
        """Cut weights, and list the weights and slices to stream.

        Args:
            starts: Weight -> the rows at which its slices begin.
            kept_rows: The rows to keep of each of them.
            kept: The whole weights to keep.
        """
        cut = cut_weights(self._weights.problem.graph, starts)
        return cut, self._streamed(cut, kept - kept_rows.keys(), kept_rows)

    def _slices(
        self, weight: Divisible, kept_rows: int, head: int, ring: RingShape
    ) -> tuple[list[int], int]:
        """Cut a weight into the kept part and slices for the ring.

        A slice ends at the end of the ring, so that no bytes of the ring are left empty.

        Args:
            weight: The weight.
            kept_rows: Its rows that are kept.
            head: Offset in the ring of the first slice.
            ring: The shape of the ring.

        Returns:
            The rows at which the slices begin, and the offset in the ring of the next slice.
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
        for buffer in weights_by_first_use(cut, per_call=True):
            part = cut.buffers[buffer]
            if part.name in kept_bytes:
                if part.offset >= kept_bytes[part.name]:
                    found.append(buffer)
            elif buffer in may_stream and buffer not in kept:
                found.append(buffer)
        return found
