"""The arena as the planner sees it: an address-ordered list of blocks.

A freed block remembers the node that vacated it, and is not merged with the blocks beside it: the
next user of its bytes has to wait for exactly that node.

Source: Turnip (arXiv 2405.16283), section on memory allocation; thesis hdl.handle.net/1911/118527.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

from ds_finepage.graph.memgraph import Extent

NEVER_USED = -1
"""Vacator of bytes that no buffer has owned yet."""


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of the arena, owned by one buffer or free.

    Invariant: the blocks of an arena are adjacent, ascending and cover it.
    """

    offset: int
    nbytes: int
    buffer: int | None  # None: free
    vacator: int = NEVER_USED  # node that freed the bytes; means nothing while owned


class BlockList:
    """Maps bytes to the buffers that own them. All sizes are multiples of the alignment."""

    def __init__(self, arena_bytes: int) -> None:
        """Start with one free block of ``arena_bytes``."""
        self._blocks = [Block(0, arena_bytes, None)] if arena_bytes > 0 else []

    def __iter__(self) -> Iterator[Block]:
        """Go over the blocks by ascending address."""
        return iter(self._blocks)

    def copy(self) -> BlockList:
        """Return another list of the same blocks."""
        found = BlockList(0)
        found._blocks = list(self._blocks)
        return found

    def alloc(self, buffer: int, nbytes: int) -> tuple[Extent, list[int]] | None:
        """Give bytes to a buffer without evicting anything.

        It takes the minimal run of free blocks that was vacated longest ago. The new user has to
        wait for the latest vacator of the run, so it waits least.

        Returns:
            The extent and the ids of the nodes that vacated it, or None if nothing fits.
        """
        best: tuple[int, int] | None = None  # first, last
        best_latest: float = inf
        blocks = self._blocks
        first = size = 0  # of a window over free blocks
        for last, block in enumerate(blocks):
            if block.buffer is not None or block.vacator >= best_latest:
                first, size = last + 1, 0
                continue
            size += block.nbytes
            while size >= nbytes and first <= last:
                latest = max(b.vacator for b in blocks[first : last + 1])
                if latest < best_latest:
                    best, best_latest = (first, last + 1), latest
                size -= blocks[first].nbytes
                first += 1
        return None if best is None else self._take(buffer, nbytes, *best)

    def alloc_at(self, buffer: int, extent: Extent) -> list[int]:
        """Give exactly these bytes, all of them free, to a buffer; return their vacators."""
        first = next(i for i, b in enumerate(self._blocks) if b.offset + b.nbytes > extent.offset)
        block = self._blocks[first]
        if block.offset < extent.offset:
            assert block.buffer is None
            head = extent.offset - block.offset
            self._blocks[first : first + 1] = [
                Block(block.offset, head, None, block.vacator),
                Block(extent.offset, block.nbytes - head, None, block.vacator),
            ]
            first += 1
        last, size = first, 0
        while size < extent.nbytes:
            assert self._blocks[last].buffer is None
            size += self._blocks[last].nbytes
            last += 1
        return self._take(buffer, extent.nbytes, first, last)[1]

    def _take(self, buffer: int, nbytes: int, first: int, last: int) -> tuple[Extent, list[int]]:
        run = self._blocks[first:last]
        offset = run[0].offset
        replaced = [Block(offset, nbytes, buffer)]
        rest = sum(b.nbytes for b in run) - nbytes
        if rest:
            replaced.append(Block(offset + nbytes, rest, None, run[-1].vacator))
        self._blocks[first:last] = replaced
        return Extent(offset, nbytes), sorted({b.vacator for b in run} - {NEVER_USED})

    def free(self, buffer: int, vacator: int) -> None:
        """Take a buffer's bytes back and stamp them with the node that vacated them."""
        for i, block in enumerate(self._blocks):
            if block.buffer == buffer:
                self._blocks[i] = Block(block.offset, block.nbytes, None, vacator)
                return
        raise AssertionError(f"buffer {buffer} owns no block")

    def best_window(self, nbytes: int, next_use: Callable[[int], float | None]) -> list[int] | None:
        """Choose the buffers to evict so that ``nbytes`` in a row become free.

        For each start, the shortest run of consecutive blocks, free or owned, that is large
        enough; its score is the soonest next use in it. The highest score wins, the lowest
        address on ties.

        Args:
            nbytes: Size that must become free.
            next_use: Next use of an owned block's buffer, infinity if there is none, None if the
                buffer is protected and must stay.

        Returns:
            The victims by ascending address, or None if every window holds a protected buffer.
        """
        blocks = self._blocks
        scores = [
            inf if b.buffer is None else next_use(b.buffer)  # None: protected
            for b in blocks
        ]
        best_score, best = -1.0, None
        for first in range(len(blocks)):
            size, score, last = 0, inf, first
            while size < nbytes and last < len(blocks):
                here = scores[last]
                if here is None or here <= best_score:
                    break  # protected, or cannot beat the best any more
                score = min(score, here)
                size += blocks[last].nbytes
                last += 1
            if size >= nbytes and score > best_score:
                best_score, best = score, (first, last)
        if best is None:
            return None
        return [b.buffer for b in blocks[best[0] : best[1]] if b.buffer is not None]
