"""Measures what ops take: their time and the device bytes they use for themselves.

Each distinct op (same overload, same tensors, same arguments) is run on scratch tensors in the very
form in which the executor will run it, so "no ``out=`` overload" shows as workspace.

[Note: the form of an op]
Whether an op may write its results into the arena is found out here and nowhere else, by
``trial.py``, and kept by signature. The executor asks with the same signature. So an op runs in the
form in which its workspace was measured, and one that was never tried (a plan from a file, scratch
that had no room) runs in the form that is always safe. Where sizes differ from call to call, the
signature is that of the sizes planned for: the largest.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ds_finepage.errors import CaptureError, TaskMismatchError
from ds_finepage.execution.device import Accelerator, Device, device_of, fork_rng
from ds_finepage.execution.meter import DeviceMeter, begin_in_main_thread, free_profiler
from ds_finepage.execution.ops import (
    BoundTask,
    bind,
    has_out_form,
    is_random,
    resolve_op,
    run_and_copy,
    unused_results,
)
from ds_finepage.execution.trial import OTHER_RESULTS, Trial, reach, same
from ds_finepage.graph.collectives import is_collective
from ds_finepage.graph.packed import PACKED_PRODUCTS, wants_fused
from ds_finepage.graph.taskgraph import JOIN, Ref, Task, TaskGraph
from ds_finepage.packing.op import workspace_bytes

NUM_ROUNDS = 3
REPEAT_BELOW_NS = 2_000_000
"""Ops faster than this are timed again on a CPU; the best of three counts."""

NUM_REPEATS = 4
"""Runs that have to agree before an op is refused for giving something else in an arena."""


@dataclasses.dataclass(frozen=True, slots=True)
class OpCost:
    """The measured cost of one op."""

    time_ns: int | None  # None: it could not be run on scratch tensors
    workspace_bytes: int
    into_place: bool = False  # seen to write its results into their extents and nowhere else
    fault: str | None = None  # what it does that no form of it can do without


def estimate_workspaces(graph: TaskGraph, *, on_accelerator: bool = True) -> TaskGraph:
    """Return the taskgraph with ``workspace_bytes`` as far as they follow from the ops alone.

    Nothing is run: an op without an ``out=`` overload takes the bytes of its results once more,
    until they are copied to their place. The workspace of a kernel itself is not counted unless the
    op is ours, and every ``out=`` overload counts as writing into place.
    """
    estimate = partial(_estimate, graph, into_place=True, on_accelerator=on_accelerator)
    tasks = (dataclasses.replace(task, workspace_bytes=estimate(task)) for task in graph.tasks)
    return dataclasses.replace(graph, tasks=tuple(tasks))


def _estimate(graph: TaskGraph, task: Task, *, into_place: bool, on_accelerator: bool) -> int:
    # The kind of argument decides whether there is an overload, not the tensors themselves.
    bound = bind(task, lambda _: None, patches=[], into_place=into_place)
    copied = task.results if bound.call is run_and_copy else ()
    nbytes = _unpacked_bytes(graph, task, on_accelerator=on_accelerator)
    for view in (graph.tensors[r] for r in copied if r is not None):
        nbytes += math.prod(view.shape) * getattr(torch, view.dtype).itemsize
    return nbytes


def _unpacked_bytes(graph: TaskGraph, task: Task, *, on_accelerator: bool) -> int:
    """Return the bytes that a product with a packed weight takes to unpack some of it."""
    if task.op not in PACKED_PRODUCTS:
        return 0
    x, numbers, scales = (graph.tensors[ref.tensor] for ref in task.args[:3])
    return workspace_bytes(
        numbers.shape,
        scales.shape,
        group=task.args[6],
        itemsize=getattr(torch, x.dtype).itemsize,
        num_given=math.prod(x.shape[:-1]),
        on_accelerator=on_accelerator,
        fused=wants_fused(task.args),
    )


class OpMeter:
    """Costs by op signature, kept over all graphs of a model.

    Attributes:
        library_bytes: Device bytes that libraries took on their first use and keep (such as the
            workspace of cuBLAS, one a stream).
    """

    def __init__(self, device: torch.device, *, num_streams: int = 1) -> None:
        """Start with nothing measured.

        Args:
            device: Where ops run.
            num_streams: The streams that run them; libraries keep memory for each.
        """
        self._device, self._num_streams = device_of(device), num_streams
        self._costs: dict[Any, OpCost] = {}
        self.library_bytes = 0
        begin_in_main_thread()

    def in_place(self, graph: TaskGraph) -> frozenset[int]:
        """Return the tasks that may write into their extents; see [Note: the form of an op]."""
        costs = [self._costs.get(s) for s in _signatures(graph)]
        return frozenset(i for i, c in enumerate(costs) if c is not None and c.into_place)

    def with_costs(
        self,
        graph: TaskGraph,
        *,
        room_bytes: int | None = None,
        make_room: Callable[[], None] = lambda: None,
    ) -> TaskGraph:
        """Return the taskgraph with measured ``time_ns`` and ``workspace_bytes``.

        Args:
            graph: The pass.
            room_bytes: What there is for scratch tensors; the workspace of an op that needs more
                (one on a large KV cache, say) is estimated, until there is room.
            make_room: Frees the device. It is called only if an op has to be measured.

        Raises:
            CaptureError: An op writes where its schema does not say it would.
        """
        signatures = _signatures(graph)
        new = {
            signature: task
            for signature, task in zip(signatures, graph.tasks, strict=True)
            if signature not in self._costs
            and task.index not in graph.host_tasks
            and (is_collective(task) or _fits(graph, task, room_bytes))  # no collective is tried
        }
        if new:
            make_room()
            self._measure(graph, new)
        tasks = []
        for signature, task in zip(signatures, graph.tasks, strict=True):
            cost = self._costs.get(signature)
            if cost is None or task.index in graph.host_tasks:
                cost = _unmeasured(graph, task, self._device)
            if cost.fault is not None:
                read = tuple(graph.buffers[b].name for b in task.reads)
                raise CaptureError(f"{task.where} {cost.fault}, so it cannot be planned", read)
            tasks.append(
                dataclasses.replace(
                    task,
                    time_ns=cost.time_ns,
                    workspace_bytes=cost.workspace_bytes,
                )
            )
        return dataclasses.replace(graph, tasks=tuple(tasks))

    @free_profiler()
    def _measure(self, graph: TaskGraph, tasks: dict[Any, Task]) -> None:
        device = self._device
        at_start = device.live_bytes
        unused = unused_results(graph)
        # Ops that draw random numbers must not draw them from the program's own sequence.
        with torch.inference_mode(False), torch.no_grad(), fork_rng([device.where]):
            for signature, task in tasks.items():
                with suppress(torch.OutOfMemoryError):
                    self._costs[signature] = _try(graph, task, device, unused)
        self.library_bytes += max(0, device.live_bytes - at_start) * self._num_streams


def _try(graph: TaskGraph, task: Task, device: Device, unused: frozenset[int]) -> OpCost:
    """Run a task on scratch tensors, into place if that is safe, else with a copy."""
    if is_collective(task):  # it would wait for ranks that measure nothing now
        return OpCost(time_ns=None, workspace_bytes=0)
    fault = None
    # How many numbers a random op draws may depend on its form.
    may_be_in_place = has_out_form(task) and not is_random(task)
    for into_place in (True, False) if may_be_in_place else (False,):
        # Scratch of the trial before is free by now.
        trial = Trial(graph, task, device.where, unused)
        try:
            wanted = trial.alone()
            cost = _attempt(trial, wanted, device, into_place=into_place)
            fault = cost.fault
            if fault is None:
                return cost
            if fault == OTHER_RESULTS and not into_place and _varies(trial, wanted):
                fault = None
        except TaskMismatchError:
            fault = "returns something else than it did when it was captured"
        except torch.OutOfMemoryError:
            raise
        except (IndexError, RuntimeError, ValueError):
            fault = None
    estimate = _unmeasured(graph, task, device)
    return estimate if fault is None else dataclasses.replace(estimate, fault=fault)


def _attempt(
    trial: Trial, wanted: list[torch.Tensor], device: Device, *, into_place: bool
) -> OpCost:
    """Return what a task takes in one form, and what it does there that it may not do."""
    bound = trial.bind(into_place=into_place)
    time_ns, workspace = _run(device, bound)
    fault = trial.fault(wanted)
    if fault is None and isinstance(device, Accelerator):
        time_ns, workspace = _run(device, bound)  # libraries have allocated on first use
    elif fault is None and time_ns <= REPEAT_BELOW_NS:
        time_ns = min(time_ns, *(_call_ns(bound) for _ in range(NUM_ROUNDS - 1)))
    return OpCost(time_ns, workspace, into_place, fault)


def _varies(trial: Trial, wanted: list[torch.Tensor]) -> bool:
    """Tell whether an op gives now this, now that, even by itself: sums by atomic additions do."""
    return not all(all(map(same, trial.alone(), wanted)) for _ in range(NUM_REPEATS))


def _fits(graph: TaskGraph, task: Task, room_bytes: int | None) -> bool:
    """Tell whether there is room for the scratch tensors of a task.

    The guard bytes between them are left out: at the least budget of a task its operands fit, and
    few bytes more.
    """
    return room_bytes is None or sum(reach(graph, task, b) for b in task.buffers) <= room_bytes


def _unmeasured(graph: TaskGraph, task: Task, device: Device) -> OpCost:
    """Estimate an op that cannot be tried, such as one that refuses random numbers."""
    nbytes = _estimate(graph, task, into_place=False, on_accelerator=device.is_accelerator)
    has_out = task.op != JOIN and any(a.is_out for a in resolve_op(task.op)._schema.arguments)
    fault = "writes to a tensor given as out= and could not be tried" if has_out else None
    return OpCost(time_ns=None, workspace_bytes=nbytes, fault=fault)


def _run(device: Device, bound: BoundTask) -> tuple[int, int]:
    """Run a task; return its time and its workspace."""
    with DeviceMeter(device.where) as meter:
        if isinstance(device, Accelerator):
            stream = device.current_stream()
            begin, end = (device.new_event(is_timed=True) for _ in range(2))
            begin.record(stream)
            bound.call(*bound.args, **bound.kwargs)
            end.record(stream)
            end.synchronize()
            time_ns = int(begin.elapsed_time(end) * 1e6)
        else:
            time_ns = _call_ns(bound)
    return time_ns, meter.peak_bytes


def _call_ns(bound: BoundTask) -> int:
    """Return the time of one call; other programs on the machine do not count."""
    start = time.thread_time_ns()
    bound.call(*bound.args, **bound.kwargs)
    return time.thread_time_ns() - start


def _signatures(graph: TaskGraph) -> list[Any]:
    unused = unused_results(graph)
    return [_signature(graph, task, unused) for task in graph.tasks]


def _signature(graph: TaskGraph, task: Task, unused: frozenset[int]) -> Any:
    """Return the key of an op's cost: overload, arguments, and tensors without their buffers."""
    if task.op == JOIN:
        return (JOIN,)

    def describe(value: Any) -> Any:
        if isinstance(value, Ref):
            view = graph.tensors[value.tensor]
            return (view.dtype, view.shape, view.stride)
        if isinstance(value, tuple):
            return tuple(describe(v) for v in value)
        return (type(value).__name__, value if value == value else "nan")

    results = tuple(None if r is None else (describe(Ref(r)), r in unused) for r in task.results)
    return (task.op, describe(task.args), describe(task.kwargs), results)
