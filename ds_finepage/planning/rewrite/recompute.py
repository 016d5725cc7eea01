"""Makes cheap activations again instead of holding them: TaskGraph -> TaskGraph.

A mask or a rotary table is made once and used in every layer. In between it takes room where
activations are largest, and each byte there costs a byte of weights that could be kept. If the
tasks that make such a buffer are cheap, and their operands are resident anyway, they run once more
just before the next use. The bytes are free in the meantime. A task whose only use comes late is
delayed in the same way; an operand that is no larger than its result then stays live instead of it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from itertools import pairwise

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.taskgraph import BufferKind, Task, TaskGraph
from ds_finepage.planning.finepage.options import DEFAULTS
from ds_finepage.planning.liveness import extent_bytes
from ds_finepage.planning.rewrite.clones import Clone, insert_clones
from ds_finepage.planning.simulator import Costs

# Named, because cost is not enough: an op that draws random numbers, or sums in another order each
# time, is as cheap as these.
_POINTWISE = (
    "abs add bitwise_and bitwise_not bitwise_or clamp clone cos div eq erf exp floor_divide ge gelu"
    " gt isinf isnan le leaky_relu log logical_and logical_not logical_or lt masked_fill maximum"
    " minimum mul ne neg pow reciprocal relu remainder rsqrt rsub sigmoid silu sin sqrt sub tanh"
    " where _to_copy"
)
_MAKING = (
    "arange full full_like lift_fresh_copy new_full new_ones new_zeros ones ones_like scalar_tensor"
    " zeros zeros_like"
)
_MOVING = "cat constant_pad_nd gather index index_select repeat stack tril triu"
_NORMS = "amax amin mean native_layer_norm _fused_rms_norm _softmax"
CHEAP_OPS = frozenset(
    f"aten.{name}" for name in f"{_POINTWISE} {_MAKING} {_MOVING} {_NORMS}".split()
)
"""Ops without products that always return the same for the same operands, without overload."""

MAX_CHAIN = 8
"""Most tasks that run again for one buffer; a rotary table takes seven."""

_NS_PER_S = 10**9


def recompute(
    graph: TaskGraph,
    alignment: int,
    profile: HardwareProfile | None = None,
    *,
    tiny_share: float = DEFAULTS.fixed_share,
) -> TaskGraph:
    """Run cheap tasks again to lower the peak of live activations.

    One idle buffer after another is freed where activations are largest, until no more can be. The
    result has the first n of these buffers, for the n that saves most: the time to copy the bytes
    by which the peak has fallen, less the time of all tasks that run again.

    Args:
        graph: The pass.
        alignment: Of extents, in bytes.
        profile: The machine. Without one, time does not count, and the lowest peak is taken.
        tiny_share: Weights up to this share of the largest are always resident, so clones may read
            them.

    Returns:
        A taskgraph that computes the same values by the same ops; ``graph`` itself if nothing is
        saved.

    Raises:
        ConfigError: The profile has a rate or size that cannot be computed with.
    """
    costs = None if profile is None else Costs(profile)
    sizes = [extent_bytes(b.nbytes, alignment) for b in graph.buffers]
    values = _Values(graph, sizes, tiny_share)
    live = _LiveBytes(graph, values, sizes)
    (start, _), floor = live.highest(), live.floor()
    found: list[Clone] = []
    num_taken = spent_ns = 0
    best: float = 0
    while True:
        peak, task = live.highest()
        saved = start - peak if profile is None else _copy_ns(start - peak, profile) - spent_ns
        if saved > best:
            best, num_taken = saved, len(found)
        clone = live.lower(peak, task)
        if clone is None:
            break
        if profile is not None and costs is not None:
            again = [t for t in clone.tasks if t != clone.begin]  # a task that moves costs nothing
            spent_ns += sum(costs.task_ns(graph, graph.tasks[t]) for t in again)
            if spent_ns >= _copy_ns(start - floor, profile):
                break  # no lower peak can save that much
        found.append(clone)
    return insert_clones(graph, found[:num_taken])


def _copy_ns(nbytes: int, profile: HardwareProfile) -> float:
    return nbytes * _NS_PER_S / profile.h2d_bytes_per_s


def _is_cheap(task: Task) -> bool:
    """Tell whether a task may run twice: it is cheap, and only writes new buffers."""
    return (
        task.op.rpartition(".")[0] in CHEAP_OPS
        and task.flops == 0
        and not task.touches
        and not set(task.reads) & set(task.writes)
    )


class _Values:
    """The buffers that can be made again, and the tasks that make them.

    ``gaps`` are the chosen clones, as (last use before, next use) by buffer. ``pins`` are the tasks
    before which a clone reads a buffer that is live there.
    """

    def __init__(self, graph: TaskGraph, sizes: list[int], tiny_share: float) -> None:
        self._graph, self._sizes = graph, sizes
        self.uses = graph.uses
        self.last_use = [found[-1] if found else -1 for found in self.uses]  # clones included
        self._changes: list[list[int]] = [[] for _ in graph.buffers]
        for task in graph.tasks:
            for buffer in (*task.writes, *task.touches):
                self._changes[buffer].append(task.index)
        weights = [b.nbytes for b in graph.buffers if b.kind is BufferKind.WEIGHT]
        self._tiny_bytes = tiny_share * max(weights, default=0)
        self._gaps: dict[int, list[tuple[int, int]]] = {}
        self._pins: dict[int, list[int]] = {}

    def can_be_made(self, buffer: int) -> bool:
        """Tell whether one cheap task alone makes the contents of an activation."""
        changes = self._changes[buffer]
        return (
            self._graph.buffers[buffer].kind is BufferKind.ACTIVATION
            and len(changes) == 1
            and changes[0] == self.uses[buffer][0]
            and _is_cheap(self._graph.tasks[changes[0]])
        )

    def clone(self, buffer: int, begin: int, end: int, peak: int) -> Clone | None:
        """Return the clone that makes a buffer again before task ``end``; None if there is none.

        Args:
            buffer: The buffer.
            begin: Its last use before it is freed.
            end: Its next use.
            peak: A task between them that shall have fewer live bytes.
        """
        if any(begin < pin <= end for pin in self._pins.get(buffer, ())):
            return None
        chain: set[int] = set()
        held: set[int] = set()
        wanted = [self.uses[buffer][0]]
        while wanted:
            maker = wanted.pop()
            chain.add(maker)
            if len(chain) > MAX_CHAIN:
                return None
            for read in self._graph.tasks[maker].reads:
                if self._is_there(read, maker, end):
                    continue
                if self.can_be_made(read):
                    wanted.append(self.uses[read][0])
                elif self._may_be_held(read, maker, peak, end):
                    held.add(read)
                else:
                    return None
        if sum(self._sizes[b] for b in held) > self._sizes[buffer]:
            return None
        return Clone(buffer, begin, end, tuple(sorted(chain)), tuple(sorted(held)))

    def _is_unchanged(self, buffer: int, reader: int, task: int) -> bool:
        """Tell whether no task changes a buffer after ``reader`` and before ``task``."""
        changes = self._changes[buffer]
        return bisect_left(changes, task) <= bisect_right(changes, reader)

    def _may_be_held(self, buffer: int, reader: int, peak: int, task: int) -> bool:
        """Tell whether an activation that is live at the peak may stay live up to ``task``."""
        is_activation = self._graph.buffers[buffer].kind is BufferKind.ACTIVATION
        was_live = self.last_use[buffer] >= peak
        return is_activation and was_live and self._is_unchanged(buffer, reader, task)

    def _is_there(self, buffer: int, reader: int, task: int) -> bool:
        """Tell whether a buffer is resident before ``task`` with the contents ``reader`` read."""
        if not self._is_unchanged(buffer, reader, task):
            return False
        found = self._graph.buffers[buffer]
        if found.kind is BufferKind.WEIGHT:
            # A larger one may be streamed, which a second use would prevent.
            return found.nbytes <= self._tiny_bytes and found.gather is None
        if found.kind is not BufferKind.ACTIVATION:
            return True
        is_away = any(begin < task < end for begin, end in self._gaps.get(buffer, ()))
        return self.last_use[buffer] >= task and not is_away

    def decide(self, clone: Clone) -> None:
        """Remember a clone, so that later ones respect it."""
        self._gaps.setdefault(clone.buffer, []).append((clone.begin, clone.end))
        for buffer in clone.held:
            self.last_use[buffer] = clone.end
        for maker in clone.tasks:
            for read in self._graph.tasks[maker].reads:
                self._pins.setdefault(read, []).append(clone.end)

    def is_decided(self, buffer: int, end: int) -> bool:
        return any(gap[1] == end for gap in self._gaps.get(buffer, ()))


class _LiveBytes:
    """The bytes of activations that are live during each task, and during the clones before it."""

    def __init__(self, graph: TaskGraph, values: _Values, sizes: list[int]) -> None:
        self._graph, self._values, self._sizes = graph, values, sizes
        num_tasks = len(graph.tasks)
        ends, begins = [0] * (num_tasks + 1), [0] * (num_tasks + 1)
        self._idle: list[list[tuple[int, int, int]]] = [[] for _ in graph.tasks]  # largest first
        for buffer in sorted(range(len(sizes)), key=lambda b: -sizes[b]):
            found = values.uses[buffer]
            if not found or graph.buffers[buffer].kind is not BufferKind.ACTIVATION:
                continue
            begins[found[0]] += sizes[buffer]
            ends[found[-1] + 1] += sizes[buffer]
            if values.can_be_made(buffer):
                for begin, end in pairwise(found):
                    for task in range(begin + 1, end):
                        self._idle[task].append((buffer, begin, end))
        self._during: list[int] = []  # while a task runs
        self._between: list[int] = []  # the part that was live before it
        live = 0
        for begun, ended in zip(begins[:-1], ends[:-1], strict=True):
            live -= ended
            self._between.append(live)
            live += begun
            self._during.append(live)
        self._clones: dict[int, list[Clone]] = {}  # by the task that they come before
        self._extra: dict[int, int] = {}  # the most bytes that they add to ``_between``
        self._heap = [(-live, task) for task, live in enumerate(self._during)]
        heapq.heapify(self._heap)

    def _at(self, task: int) -> int:
        return max(self._during[task], self._between[task] + self._extra.get(task, 0))

    def highest(self) -> tuple[int, int]:
        """Return the most live bytes, and the first task that has them during it or before it."""
        while self._heap:
            live, task = self._heap[0]
            if -live == self._at(task):
                return -live, task
            heapq.heapreplace(self._heap, (-self._at(task), task))
        return 0, 0

    def floor(self) -> int:
        """Return the most activation bytes that one task names: no peak can be lower."""
        kinds = [b.kind is BufferKind.ACTIVATION for b in self._graph.buffers]
        named = (sum(self._sizes[b] for b in t.buffers if kinds[b]) for t in self._graph.tasks)
        return max(named, default=0)

    def lower(self, peak: int, task: int) -> Clone | None:
        """Free an idle buffer during a task; None if none can be made again below the peak."""
        for buffer, begin, end in self._idle[task] if self._heap else ():
            if self._values.is_decided(buffer, end):
                continue
            clone = self._values.clone(buffer, begin, end, task)
            if clone is None:
                continue
            size = self._sizes[buffer] - sum(self._sizes[b] for b in clone.held)
            extra = self._extra_bytes([*self._clones.get(end, ()), clone])
            if self._between[end] - size + extra < peak:
                self._apply(clone, extra)
                return clone
        return None

    def _apply(self, clone: Clone, extra: int) -> None:
        for buffer in clone.held:
            self._add(self._values.last_use[buffer], clone.end, self._sizes[buffer])
        self._add(clone.begin, clone.end, -self._sizes[clone.buffer])
        self._values.decide(clone)
        self._clones.setdefault(clone.end, []).append(clone)
        self._extra[clone.end] = extra
        heapq.heappush(self._heap, (-self._at(clone.end), clone.end))

    def _add(self, begin: int, end: int, nbytes: int) -> None:
        """Count bytes that are live between two tasks, but not during them."""
        for task in range(begin + 1, end + 1):
            self._between[task] += nbytes
            if task < end:
                self._during[task] += nbytes

    def _extra_bytes(self, clones: list[Clone]) -> int:
        """Return the most live bytes of clones that run one after the other."""
        most = made = 0
        for clone in clones:
            tasks = [self._graph.tasks[t] for t in clone.tasks]
            last = {b: i for i, t in enumerate(tasks) for b in (*t.writes, *t.reads)}
            held = made
            for i, task in enumerate(tasks):
                held += sum(self._sizes[b] for b in task.writes)
                most = max(most, held)
                gone = [b for b, end in last.items() if end == i and b != clone.buffer]
                held -= sum(self._sizes[b] for b in gone if any(b in t.writes for t in tasks))
            made += self._sizes[clone.buffer]
        return most
