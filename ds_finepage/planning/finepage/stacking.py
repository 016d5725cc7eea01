"""Places kept weights so that two alternating passes can share them.

Two passes of one model (a prefill and a decode step) share an arena but not their needs: the pass
with larger activations can keep fewer weights. Both stack their residents from the upper end of the
arena downwards. So one pass can leave in place all residents above the bytes that it needs itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ds_finepage.graph.memgraph import Extent, MemGraph
from ds_finepage.graph.taskgraph import Buffer


@dataclass(frozen=True, slots=True)
class SharedResident:
    """A weight, or a slice of one, that the alternating pass keeps in an extent."""

    buffer: Buffer
    extent: Extent


def residents_of(memgraph: MemGraph) -> tuple[SharedResident, ...]:
    """List the weights that a plan keeps from pass to pass, highest offset first."""
    found = [SharedResident(memgraph.graph.buffers[r.buffer], r.extent) for r in memgraph.entry]
    return tuple(sorted(found, key=lambda s: (-s.extent.offset, s.buffer.key)))


def spread_order(items: Sequence[int]) -> list[int]:
    """Reorder items so that any first part of the result is spread over the whole input.

    The order of van der Corput's sequence: positions by their reversed binary digits. A pass that
    keeps only the top of a stack in this order still keeps weights spread over the whole pass, so
    its reloads are spread evenly too.
    """
    num_bits = max(len(items) - 1, 0).bit_length()

    def reversed_bits(at: int) -> int:
        return int(f"{at:0{num_bits}b}"[::-1], 2) if num_bits else 0

    return [items[at] for at in sorted(range(len(items)), key=reversed_bits)]


def stack_down(order: Iterable[int], sizes: Mapping[int, int], top: int) -> dict[int, Extent]:
    """Stack buffers downwards.

    Args:
        order: The buffers, highest first.
        sizes: Bytes of each.
        top: Offset at which the stack begins.

    Returns:
        Buffer -> extent. Offsets are negative if the stack is too high.
    """
    placed = {}
    for buffer in order:
        top -= sizes[buffer]
        placed[buffer] = Extent(top, sizes[buffer])
    return placed
