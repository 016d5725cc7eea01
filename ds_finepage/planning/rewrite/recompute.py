"""Makes cheap activations again instead of holding them: TaskGraph -> TaskGraph.

A mask or a rotary table is made once and used in every layer. In between it takes room where
activations are largest, and each byte there costs a byte of weights that could be kept. If the
tasks that make such a buffer are cheap, and their operands are resident anyway, they run once more
just before the next use. The bytes are free in the meantime. A task whose only use comes late is
delayed in the same way; an operand that is no larger than its result then stays live instead of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import pairwise

from ds_finepage.graph.taskgraph import BufferKind, Task, TaskGraph
from ds_finepage.graph.unpacking import POINTWISE_OPS, packet_of
from ds_finepage.planning.finepage.residency import FIXED_SHARE
from ds_finepage.planning.liveness import extent_bytes, live_activation_bytes
from ds_finepage.planning.rewrite.clones import Clone, insert_clones
from ds_finepage.planning.rewrite.embeddings import looked_up_bytes

_MAKING = (
    "arange full full_like lift_fresh_copy new_full new_ones new_zeros ones ones_like scalar_tensor"
    " zeros zeros_like"
)
_MOVING = "cat constant_pad_nd gather index index_select repeat stack tril triu"
_NORMS = "amax amin mean native_layer_norm _fused_rms_norm _softmax"
# Named, because cost is not enough: an op that draws random numbers, or sums in another order each
# time, is as cheap as these.
CHEAP_OPS = POINTWISE_OPS | {f"aten.{name}" for name in f"{_MAKING} {_MOVING} {_NORMS}".split()}
"""Ops without products that always return the same for the same operands, without overload."""

MAX_CHAIN = 8
"""Most tasks that run again for one buffer; a rotary table takes seven."""


def recompute(graph: TaskGraph, alignment: int) -> TaskGraph:
    """Run cheap tasks again to lower the peak of live activations as far as they can.

    One buffer after another is freed wherever it is idle and activations are largest, until none
    lowers the peak. A search holds plans for the result against those for the pass itself, so time
    does not count here.

    Args:
        graph: The pass.
        alignment: Of extents, in bytes.

    Returns:
        A taskgraph that computes the same values by the same ops; ``graph`` itself if its peak is
        the lowest.
    """
    best, lower = graph, _with_lower_peak(graph, alignment)
    while lower is not None:
        if _peak(lower, alignment)[0] < _peak(best, alignment)[0]:
            best = lower
        lower = _with_lower_peak(lower, alignment)
    return best


def _peak(graph: TaskGraph, alignment: int) -> tuple[int, list[int]]:
    """Return the most live bytes of activations, and the tasks that have them."""
    live = live_activation_bytes(graph, alignment)
    peak = max(live, default=0)
    return peak, [task for task, nbytes in enumerate(live) if nbytes == peak]


def _with_lower_peak(graph: TaskGraph, alignment: int) -> TaskGraph | None:
    """Free one buffer where it is idle at the peak; None if none can be made again below it."""
    peak, tasks = _peak(graph, alignment)
    if not tasks:
        return None
    maker = _Maker(graph, alignment)
    for buffer in sorted(range(len(graph.buffers)), key=lambda b: -graph.buffers[b].nbytes):
        clones = list(maker.clones(buffer, tasks))
        if not clones:
            continue
        found = insert_clones(graph, clones)
        lower, left = _peak(found, alignment)
        if (lower, len(left)) < (peak, len(tasks)):
            return found
    return None


class _Maker:
    """Finds the tasks that make a buffer again."""

    def __init__(self, graph: TaskGraph, alignment: int) -> None:
        self._graph, tables = graph, looked_up_bytes(graph)
        self._sizes = [extent_bytes(b.nbytes, alignment) for b in graph.buffers]
        self._changes: list[list[int]] = [[] for _ in graph.buffers]
        for task in graph.tasks:
            for buffer in (*task.writes, *task.touches):
                self._changes[buffer].append(task.index)
        weights = [b for b in graph.buffers if b.kind is BufferKind.WEIGHT and b.id not in tables]
        self._tiny_bytes = FIXED_SHARE * max((b.nbytes for b in weights), default=0)

    def clones(self, buffer: int, tasks: list[int]) -> Iterator[Clone]:
        """Yield the clones that make a buffer again after it was idle during some of the tasks."""
        if not self._can_be_made(buffer):
            return
        for begin, end in pairwise(self._graph.uses[buffer]):
            if bisect_right(tasks, begin) < bisect_left(tasks, end):
                chain = self._chain(buffer, begin, end)
                if chain:
                    yield Clone(buffer, end, chain)

    def _can_be_made(self, buffer: int) -> bool:
        """Tell whether one cheap task alone makes the contents of an activation."""
        changes = self._changes[buffer]
        return (
            self._graph.buffers[buffer].kind is BufferKind.ACTIVATION
            and len(changes) == 1
            and changes[0] == self._graph.uses[buffer][0]
            and _is_cheap(self._graph.tasks[changes[0]])
        )

    def _chain(self, buffer: int, begin: int, end: int) -> tuple[int, ...]:
        """Return the tasks to run again before task ``end``, in order; none if that cannot be."""
        chain: set[int] = set()
        held: set[int] = set()
        wanted = [self._graph.uses[buffer][0]]
        while wanted:
            maker = wanted.pop()
            chain.add(maker)
            for read in self._graph.tasks[maker].reads:
                changes = any(maker < change < end for change in self._changes[read])
                if not changes and self._is_there(read, end):
                    continue
                if self._can_be_made(read):
                    wanted.append(self._graph.uses[read][0])
                elif not changes and self._is_there(read, begin + 1):
                    held.add(read)
                else:
                    return ()
            if len(chain) > MAX_CHAIN:
                return ()
        if sum(self._sizes[b] for b in held) > self._sizes[buffer]:
            return ()
        return tuple(sorted(chain))

    def _is_there(self, buffer: int, task: int) -> bool:
        """Tell whether a buffer is resident before a task."""
        found = self._graph.buffers[buffer]
        if found.kind is BufferKind.WEIGHT:
            # A larger one may be streamed, which a second use would prevent.
            return found.nbytes <= self._tiny_bytes and found.gather is None
        return found.kind is not BufferKind.ACTIVATION or self._graph.uses[buffer][-1] >= task


def _is_cheap(task: Task) -> bool:
    """Tell whether a task may run twice: it is cheap, and only writes new buffers."""
    return (
        packet_of(task) in CHEAP_OPS
        and task.flops == 0
        and not task.touches
        and not set(task.reads) & set(task.writes)
    )
