"""Measures ops on weights twice on the CPU: weights from memory, and weights just written.

A resident weight was last read a pass ago, so an op finds it in memory. A weight that was just
reloaded lies in a region of the arena that is written and read all the time, so an op finds part of
it in the processor's caches. The copy is that of another thread, as in the h2d lane.

Many ops are measured after one flush of the caches, which takes longer than all of them.

[Note: units that sleep]
A processor turns the units for wide products off while it does something else, a flush of the
caches for example. Products in bfloat16 then take up to 1.7 times as long, for 3 to 4 ms. In a pass
they are awake. So small products, which leave the caches as they are, wake them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import torch

from ds_finepage.execution.ops import BoundTask
from ds_finepage.execution.trial import Tiles, Trial, scratch_bytes
from ds_finepage.graph.routes import groups_of
from ds_finepage.graph.taskgraph import BufferKind, Task, TaskGraph

MOST_FLUSHED_BYTES, LEAST_FLUSHED_BYTES = 256 << 20, 64 << 20
"""Written before a round of ops on weights, and at least where there are many rounds. The first is
what a program gets of the last cache of a large server that has nothing else to do. A model with
fewer weights loses less."""

CORE_BYTES = 2 << 20
"""The size of a core's own cache. It is written before each op on weights that were just written,
and before each op that reads few weights: its code has gone since the last op of its kind."""

WOKEN = frozenset({"float32", "bfloat16"})
WAKE_NS, WAKE_ROWS = 5_000_000, 128
"""See [Note: units that sleep]: the dtypes of products, how long they run before a round, and the
size of one."""

NUM_ROUNDS = 3
REPEAT_BELOW_NS = 2_000_000
"""Ops faster than this are timed again; the best of three counts."""


def reads_mostly_weights(graph: TaskGraph, task: Task) -> bool:
    """Tell whether more than half of the bytes of an op's operands are weights."""
    return 2 * weight_bytes_of(graph, task) > sum(graph.buffers[b].nbytes for b in task.buffers)


def is_timed_later(graph: TaskGraph, task: Task) -> bool:
    """Tell whether :class:`WeightTimes` times an op.

    Weights that no cache holds are as cold as they can be without it. But experts need rows for
    each of them.
    """
    is_small = weight_bytes_of(graph, task) <= LEAST_FLUSHED_BYTES
    return reads_mostly_weights(graph, task) and (is_small or groups_of(task) is not None)


def weight_bytes_of(graph: TaskGraph, task: Task) -> int:
    """Return the bytes of the weights among an op's operands."""
    operands = [graph.buffers[b] for b in task.buffers]
    return sum(b.nbytes for b in operands if b.kind is BufferKind.WEIGHT)


def call_ns(bound: BoundTask) -> int:
    """Return the time of one call; other programs on the machine do not count."""
    start = time.thread_time_ns()
    bound.call(*bound.args, **bound.kwargs)
    return time.thread_time_ns() - start


class WeightTimes:
    """Times ops on weights; each gets two times, in nanoseconds."""

    def __init__(
        self, graph: TaskGraph, tiles: Tiles, unused: frozenset[int], flush: torch.Tensor
    ) -> None:
        """Prepare.

        Args:
            graph: Where the ops stand.
            tiles: What to fill scratch with.
            unused: Results that no task reads.
            flush: Host memory to write, 1-d uint8; not of the run.
        """
        self._graph, self._tiles, self._unused, self._flush = graph, tiles, unused, flush

    def measure(
        self, tasks: Mapping[Any, tuple[Task, bool]], room_bytes: int | None
    ) -> dict[Any, tuple[int, int]]:
        """Return the time of each op with weights from memory, and with weights just written.

        Args:
            tasks: Signature -> the task, and whether it writes into its extents.
            room_bytes: What there is for scratch tensors.
        """
        batches = list(self._batches(tasks, room_bytes))
        flushed = max(LEAST_FLUSHED_BYTES, MOST_FLUSHED_BYTES // max(1, len(batches)))
        found = {}
        with ThreadPoolExecutor(1) as lane:
            for batch in batches:
                found.update(self._batch(batch, self._flush[:flushed], lane))
        return found

    def _batches(
        self, tasks: Mapping[Any, tuple[Task, bool]], room_bytes: int | None
    ) -> Iterator[dict[Any, tuple[Task, bool]]]:
        """Cut ops into batches whose scratch fits."""
        most = MOST_FLUSHED_BYTES if room_bytes is None else min(room_bytes, MOST_FLUSHED_BYTES)
        batch: dict[Any, tuple[Task, bool]] = {}
        taken = 0
        for signature, (task, into_place) in tasks.items():
            nbytes = scratch_bytes(self._graph, task)
            if batch and taken + nbytes > most:
                yield batch
                batch, taken = {}, 0
            batch[signature] = (task, into_place)
            taken += nbytes
        if batch:
            yield batch

    def _batch(
        self, batch: Mapping[Any, tuple[Task, bool]], flushed: torch.Tensor, lane: Executor
    ) -> dict[Any, tuple[int, int]]:
        graph, tiles, unused = self._graph, self._tiles, self._unused
        trials = {
            s: Trial(graph, task, tiles, unused, is_timed=True) for s, (task, _) in batch.items()
        }
        bound = {s: trials[s].bind(into_place=into) for s, (_, into) in batch.items()}
        weights = {
            s: [b for b in task.buffers if graph.buffers[b].kind is BufferKind.WEIGHT]
            for s, (task, _) in batch.items()
            if weight_bytes_of(graph, task) <= LEAST_FLUSHED_BYTES
        }

        def warm_up(signature: Any) -> None:
            lane.submit(trials[signature].write_again, weights[signature]).result()
            self._flush[:CORE_BYTES].fill_(1)

        dtypes = {
            graph.tensors[r].dtype for t, _ in batch.values() for r in t.results if r is not None
        }

        def flush() -> None:
            flushed.fill_(1)
            _wake(dtypes)

        cold = _best(bound, before_round=flush)
        warm = _best({s: bound[s] for s in weights}, before_op=warm_up)
        return {s: (ns, min(ns, warm.get(s, ns))) for s, ns in cold.items()}


def _wake(dtypes: Collection[str]) -> None:
    """Multiply small matrices for a while; see [Note: units that sleep].

    Args:
        dtypes: Of the results to come; those of no product are left out.
    """
    for dtype in sorted(WOKEN & {*dtypes}):
        square = torch.ones(WAKE_ROWS, WAKE_ROWS, dtype=getattr(torch, dtype))
        end = time.perf_counter_ns() + WAKE_NS
        while time.perf_counter_ns() < end:
            torch.mm(square, square)


def _best(
    bound: Mapping[Any, BoundTask],
    *,
    before_round: Callable[[], object] = lambda: None,
    before_op: Callable[[Any], object] = lambda _: None,
) -> dict[Any, int]:
    """Run ops in rounds; return the best time of each."""
    found: dict[Any, int] = {}
    for _ in range(NUM_ROUNDS):
        fast = [s for s in bound if found.get(s, 0) <= REPEAT_BELOW_NS]
        if fast:
            before_round()
        for signature in fast:
            before_op(signature)
            took = call_ns(bound[signature])
            found[signature] = min(took, found.get(signature, took))
    return found
