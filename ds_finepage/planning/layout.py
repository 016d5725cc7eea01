"""Places buffers whose live ranges are known.

Offline dynamic storage allocation: largest buffers first, each at the lowest offset that is free
over its whole live range. Source: greedy by size, as in "Efficient Memory Management for Deep
Neural Net Inference" (arXiv 2001.03288).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ds_finepage.graph.memgraph import Extent


@dataclass(frozen=True, slots=True)
class LiveBuffer:
    """A buffer to place: its size in bytes (aligned) and its live range, both ends included."""

    buffer: int
    nbytes: int
    begin: int
    end: int

    @property
    def tasks(self) -> range:
        """The tasks during which it is live."""
        return range(self.begin, self.end + 1)


def place(live: Sequence[LiveBuffer]) -> dict[int, Extent]:
    """Place buffers so that buffers that live at the same time do not overlap.

    Returns:
        Buffer -> extent. The result depends on the input only, not on its order.
    """
    ordered = sorted(live, key=lambda i: (-i.nbytes, i.begin, i.buffer))
    placed = first_fit([(item.nbytes, item.tasks) for item in ordered])
    return {item.buffer: extent for item, extent in zip(ordered, placed, strict=True)}


def first_fit(items: Iterable[tuple[int, Iterable[int]]]) -> list[Extent]:
    """Place items (bytes, tasks during which they live) one by one, each as low as possible."""
    at: dict[int, list[Extent]] = {}  # task -> extents that are live while it runs
    begun: dict[int, list[Extent]] = {}  # task -> extents whose live range starts here
    placed = []
    for nbytes, tasks in items:
        taken: set[Extent] = set()
        runs = _runs(tasks)
        for first, last in runs:
            # These extents are live when this run begins, or start later in it.
            taken.update(at.get(first, ()))
            for task in range(first + 1, last + 1):
                taken.update(begun.get(task, ()))
        offset = 0
        for extent in sorted(taken, key=attrgetter("offset")):
            if extent.offset - offset >= nbytes:
                break
            offset = max(offset, extent.end)
        found = Extent(offset, nbytes)
        placed.append(found)
        for first, last in runs:
            begun.setdefault(first, []).append(found)
            for task in range(first, last + 1):
                at.setdefault(task, []).append(found)
    return placed


def _runs(tasks: Iterable[int]) -> list[tuple[int, int]]:
    """Return the stretches of consecutive tasks, first and last of each."""
    if isinstance(tasks, range) and tasks.step == 1:
        return [(tasks.start, tasks.stop - 1)] if tasks else []
    found: list[tuple[int, int]] = []
    for task in sorted(set(tasks)):
        if found and task == found[-1][1] + 1:
            found[-1] = (found[-1][0], task)
        else:
            found.append((task, task))
    return found


def top_of(placed: Mapping[int, Extent]) -> int:
    """Return the bytes that a placement needs."""
    return max((e.end for e in placed.values()), default=0)


class Tenancy:
    """Remembers the nodes that vacated bytes, for memory dependencies.

    Invariant: ``_starts`` is ascending; segment i reaches to the start of segment i + 1, and was
    vacated by ``_vacators[i]``, None if no buffer has owned it yet.
    """

    def __init__(self) -> None:
        """Start with bytes that no buffer has owned."""
        self._starts = [0]
        self._vacators: list[int | None] = [None]

    def _cut(self, offset: int) -> int:
        """Make a segment begin at ``offset``; return its index."""
        at = bisect.bisect_left(self._starts, offset)
        if at == len(self._starts) or self._starts[at] != offset:
            self._starts.insert(at, offset)
            self._vacators.insert(at, self._vacators[at - 1])
        return at

    def vacators(self, extent: Extent) -> list[int]:
        """Return the nodes that a new owner of ``extent`` has to wait for, ascending."""
        first = bisect.bisect_right(self._starts, extent.offset) - 1
        last = bisect.bisect_left(self._starts, extent.end)
        return sorted({v for v in self._vacators[first:last] if v is not None})

    def free(self, extent: Extent, vacator: int) -> None:
        """Note that a node vacated ``extent``."""
        first = self._cut(extent.offset)
        last = self._cut(extent.end)
        self._starts[first:last] = [extent.offset]
        self._vacators[first:last] = [vacator]
