"""Measures what ops take: their time and the device bytes they use for themselves (floor 2).

Each distinct op (same overload, same tensors, same arguments) is run on scratch tensors in the very
form in which the executor will run it, so "no ``out=`` overload" shows as workspace. On CPU the
bytes come from the allocator's own events in torch's profiler, on CUDA from its statistics.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from ds_finepage.execution.arena import view_of
from ds_finepage.execution.ops import BoundTask, bind, run_and_copy
from ds_finepage.graph.routes import groups_of
from ds_finepage.graph.taskgraph import JOIN, Ref, Task, TaskGraph

REPEAT_BELOW_NS = 2_000_000
"""Ops faster than this are timed again; the best of three counts."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpCost:
    """What one op takes."""

    time_ns: int | None  # None: it could not be run on scratch tensors
    workspace_bytes: int


def estimate_workspaces(graph: TaskGraph) -> TaskGraph:
    """Return the taskgraph with ``workspace_bytes`` as far as they follow from the ops alone.

    Nothing is run: an op without an ``out=`` overload takes the bytes of its results once more,
    until they are copied to their place. What a kernel takes for itself is not counted.
    """
    known: dict[Any, int] = {}
    tasks = []
    for task in graph.tasks:
        # The kind of argument decides whether there is an overload, not the tensors themselves.
        results = tuple(None if r is None else _result_bytes(graph, r) for r in task.results)
        key = (task.op, results)
        if key not in known:
            bound = bind(task, lambda _: None, patches=[])
            copies = bound.call is run_and_copy
            known[key] = sum(filter(None, results)) if copies else 0
        tasks.append(dataclasses.replace(task, workspace_bytes=known[key]))
    return dataclasses.replace(graph, tasks=tuple(tasks))


def _result_bytes(graph: TaskGraph, tensor: int) -> int:
    view = graph.tensors[tensor]
    return math.prod(view.shape) * int(getattr(torch, view.dtype).itemsize)


class OpMeter:
    """Costs by op signature, kept over all graphs of a model.

    Attributes:
        library_bytes: Device bytes that libraries took on their first use and keep (on CUDA the
            workspace of cuBLAS, one a stream).
    """

    def __init__(self, device: torch.device) -> None:
        """Start with nothing measured."""
        self._device = device
        self._costs: dict[Any, OpCost] = {}
        self.library_bytes = 0

    def knows_all(self, graph: TaskGraph) -> bool:
        """Tell whether every op of a graph has been measured already."""
        return all(_signature(graph, t) in self._costs for t in graph.tasks)

    def with_costs(self, graph: TaskGraph, *, room_bytes: int | None = None) -> TaskGraph:
        """Return the taskgraph with measured ``time_ns`` and ``workspace_bytes``.

        Args:
            graph: The pass.
            room_bytes: What there is for scratch tensors; the workspace of an op that needs more
                (one on a large KV cache, say) is estimated.
        """
        signatures = [_signature(graph, t) for t in graph.tasks]
        new = {s: t for s, t in zip(signatures, graph.tasks, strict=True) if s not in self._costs}
        for signature, task in list(new.items()):
            scratch = sum(max(1, _reach(graph, task, b)) for b in task.buffers)
            if room_bytes is not None and scratch > room_bytes:
                self._costs[signature] = _unmeasured(graph, task)
                del new[signature]
        if new:
            self._measure(graph, new)
        tasks = tuple(
            dataclasses.replace(t, **dataclasses.asdict(self._costs[s]))
            for s, t in zip(signatures, graph.tasks, strict=True)
        )
        return dataclasses.replace(graph, tasks=tasks)

    def _measure(self, graph: TaskGraph, tasks: dict[Any, Task]) -> None:
        # Ops that draw random numbers must not draw them from the program's own sequence.
        devices = [self._device] if self._device.type == "cuda" else []
        fork = torch.random.fork_rng(devices)
        with torch.inference_mode(False), torch.no_grad(), fork:
            if self._device.type == "cuda":
                self._measure_on_cuda(graph, tasks)
            else:
                self._measure_on_cpu(graph, tasks)

    def _measure_on_cuda(self, graph: TaskGraph, tasks: dict[Any, Task]) -> None:
        device = self._device
        at_start = torch.cuda.memory_allocated(device)
        for signature, task in tasks.items():
            bound = _on_scratch(graph, task, device)
            try:
                bound.call(*bound.args, **bound.kwargs)  # libraries allocate on first use
            except RuntimeError:
                self._costs[signature] = _unmeasured(graph, task)
                del bound
                continue
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record()
            bound.call(*bound.args, **bound.kwargs)
            end.record()
            torch.cuda.synchronize(device)
            self._costs[signature] = OpCost(
                time_ns=int(begin.elapsed_time(end) * 1e6),
                workspace_bytes=torch.cuda.max_memory_allocated(device) - before,
            )
            del bound
        self.library_bytes += max(0, torch.cuda.memory_allocated(device) - at_start)

    def _measure_on_cpu(self, graph: TaskGraph, tasks: dict[Any, Task]) -> None:
        # Kineto announces every start and stop on stderr at lower levels.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        times: list[int | None] = []
        with profile(use_kineto=False, profile_memory=True) as profiler:
            for index, task in enumerate(tasks.values()):
                bound = _on_scratch(graph, task, self._device)
                with record_function(f"{_MARK}{index}"):
                    try:
                        times.append(_time(bound))
                    except RuntimeError:
                        times.append(None)
                del bound  # before the scratch tensors of the next are made
        peaks = _peaks(profiler)
        for index, (signature, task) in enumerate(tasks.items()):
            took = times[index]
            self._costs[signature] = (
                _unmeasured(graph, task) if took is None else OpCost(took, peaks.get(index, 0))
            )


def _unmeasured(graph: TaskGraph, task: Task) -> OpCost:
    """Estimate an op that refuses zeros, such as a draw from a distribution."""
    results = sum(_result_bytes(graph, r) for r in task.results if r is not None)
    return OpCost(time_ns=None, workspace_bytes=results)


_MARK = "finepage::"


def _time(bound: BoundTask) -> int:
    best = None
    for _ in range(3):
        start = time.perf_counter_ns()
        bound.call(*bound.args, **bound.kwargs)
        took = time.perf_counter_ns() - start
        best = took if best is None else min(best, took)
        if took > REPEAT_BELOW_NS:
            break
    assert best is not None
    return best


def allocation_events(profiler: Any) -> Iterator[tuple[int, int]]:
    """Go over the allocator's events of a finished profile as (time in ns, signed bytes)."""
    found = [
        (e.start_ns(), e.nbytes())
        for e in profiler.kineto_results.events()
        if e.name() == "[memory]"
    ]
    yield from sorted(found, key=lambda pair: pair[0])


def _peaks(profiler: Any) -> dict[int, int]:
    """For each marked range, the most bytes that were live in it beyond those at its start."""
    marks = sorted(
        (e.start_ns(), e.start_ns() + e.duration_ns(), int(e.name()[len(_MARK) :]))
        for e in profiler.kineto_results.events()
        if e.name().startswith(_MARK)
    )
    peaks: dict[int, int] = {}
    events = list(allocation_events(profiler))
    at = 0
    for start, end, index in marks:
        while at < len(events) and events[at][0] < start:
            at += 1
        live = peak = 0
        while at < len(events) and events[at][0] <= end:
            live += events[at][1]
            peak = max(peak, live)
            at += 1
        peaks[index] = peak
    return peaks


def _on_scratch(graph: TaskGraph, task: Task, device: torch.device) -> BoundTask:
    """Bind a task to scratch tensors full of zeros, which are valid indices everywhere.

    But where zeros would mean that there is nothing to do, there is as much as there can be: masks
    choose everything, and of groups of rows the first has them all.
    """
    scratch = {
        b: torch.zeros(max(1, _reach(graph, task, b)), dtype=torch.uint8, device=device)
        for b in task.buffers
    }

    def tensor(index: int) -> torch.Tensor:
        return view_of(scratch[graph.tensors[index].buffer], graph.tensors[index])

    masks = {graph.tensors[t] for t in _tensor_ids(task) if graph.tensors[t].dtype == "bool"}
    for buffer in {mask.buffer for mask in masks}:
        scratch[buffer].fill_(1)
    groups = groups_of(task)
    if groups is not None and len(graph.tensors[groups.rows].shape) == 2:
        tensor(groups.ends).fill_(graph.tensors[groups.rows].shape[0])
    return bind(task, tensor, patches=[])


def _reach(graph: TaskGraph, task: Task, buffer: int) -> int:
    """Bytes of a buffer that a task's views reach, so that a slice of a large one stays small."""
    reach = 0
    for index in _tensor_ids(task):
        view = graph.tensors[index]
        if view.buffer == buffer and 0 not in view.shape:
            last = view.offset + sum(
                (n - 1) * s for n, s in zip(view.shape, view.stride, strict=True)
            )
            reach = max(reach, (last + 1) * getattr(torch, view.dtype).itemsize)
    return reach


def _tensor_ids(task: Task) -> list[int]:
    found: list[int] = [r for r in task.results if r is not None]

    def collect(value: Any) -> None:
        if isinstance(value, Ref):
            found.append(value.tensor)
        elif isinstance(value, tuple):
            for item in value:
                collect(item)

    collect(task.args)
    collect(task.kwargs)
    return found


def _signature(graph: TaskGraph, task: Task) -> Any:
    """What decides an op's cost: overload, arguments, and its tensors but for their buffers."""
    if task.op == JOIN:
        return (JOIN,)

    def describe(value: Any) -> Any:
        if isinstance(value, Ref):
            view = graph.tensors[value.tensor]
            return (view.dtype, view.shape, view.stride)
        if isinstance(value, tuple):
            return tuple(describe(v) for v in value)
        return (type(value).__name__, value if value == value else "nan")

    results = tuple(None if r is None else describe(Ref(r)) for r in task.results)
    return (task.op, describe(task.args), describe(task.kwargs), results)
