"""Where kept weights lie, so that one pass leaves them to the next.

Two passes of one model (a prefill and a decode step) share an arena but not their needs: the one
with larger activations has less room to keep weights in. Both stack what they keep from the upper
end of the arena downwards, so that the one can leave in place whatever lies above the bytes that it
needs itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_finepage.graph.memgraph import Extent, MemGraph
from ds_finepage.graph.taskgraph import Buffer


@dataclass(frozen=True, slots=True)
class SharedResident:
    """A weight, or a slice of one, that another pass keeps, and where."""

    buffer: Buffer
    extent: Extent


def residents_of(memgraph: MemGraph) -> tuple[SharedResident, ...]:
    """List what a plan keeps from pass to pass, the uppermost first."""
    found = [SharedResident(memgraph.graph.buffers[r.buffer], r.extent) for r in memgraph.entry]
    return tuple(sorted(found, key=lambda s: (-s.extent.offset, s.buffer.key)))


def spread_order(items: Sequence[int]) -> list[int]:
    """Reorder items so that those at the front of the result are spread over all of the input.

    The order of van der Corput's sequence: position with its binary digits reversed. Whoever can
    keep but the upper end of a stack in this order keeps weights from all over the pass, and its
    reloads are spread evenly too.
    """
    num_bits = max(len(items) - 1, 0).bit_length()

    def reversed_bits(at: int) -> int:
        return int(f"{at:0{num_bits}b}"[::-1], 2) if num_bits else 0

    return [items[at] for at in sorted(range(len(items)), key=reversed_bits)]


def stack_down(order: Iterable[int], sizes: Mapping[int, int], top: int) -> dict[int, Extent]:
    """Stack buffers below ``top`` (bytes), the first uppermost; offsets may turn out negative."""
    placed = {}
    for buffer in order:
        top -= sizes[buffer]
        placed[buffer] = Extent(top, sizes[buffer])
    return placed
