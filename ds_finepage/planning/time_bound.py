"""A lower bound on the time of a pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ds_finepage.graph.attention import attentions
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.host_work import host_work
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import TO_HOST, BufferKind, Task, TaskGraph
from ds_finepage.planning.bounds import LowerBound
from ds_finepage.planning.rewrite.host_attention import host_task
from ds_finepage.planning.rewrite.split import MATMULS
from ds_finepage.planning.simulator import Costs
from ds_finepage.units import NS_PER_S


def least_time_ns(bound: LowerBound, profile: HardwareProfile, arena_bytes: int) -> int:
    """Return a time that no steady pass beats: that of its tasks, its copies or its collects.

    It holds for one batch at a time, with the tasks in program order. New rows of a KV cache that
    go to host memory count for their link only.

    Args:
        bound: The fewest bytes that a pass reloads.
        profile: The machine.
        arena_bytes: Size of the arena.
    """
    graph, tasks_ns = bound.graph, alone_ns(bound.graph, profile)
    # Each rank reloads its part of a weight over a link of its own.
    profile = replace(profile, h2d_bytes_per_s=profile.h2d_bytes_per_s * graph.num_ranks)
    written = {b for task in graph.tasks if task.op == TO_HOST for b in task.writes}
    written_bytes = sum(graph.buffers[b].nbytes for b in written)
    return max(
        bound.time_ns(tasks_ns, profile.h2d_bytes_per_s),
        max(end_times_ns(graph, profile), default=0),
        _least_copies_ns(bound, profile, arena_bytes),
        _least_collects_ns(bound, profile),
        int(written_bytes * 1e9 / profile.d2h_bytes_per_s),
    )


def least_time_beside_host_ns(bound: LowerBound, profile: HardwareProfile) -> int:
    """Return a time that no steady pass beats in which the host may compute.

    Two kinds of tasks may run on the host: products, and attention. It issues the others in ``n``
    seconds, and computes nothing meanwhile. In the rest of ``t`` seconds it reads ``h`` of the
    ``b`` bytes of each kind, at its rate ``k``, while the link copies at rate ``l`` all the time.
    They move the missing ``m`` bytes between them. For any rate ``r``, each ``h`` is at most
    ``r h / k`` and, where ``k`` is more than ``r``, ``b (1 - r / k)``. The sum of ``h / k`` is at
    most ``t - n``. So ``l t + r (t - n)``, with what the faster kinds add, is ``m`` or more.

    The device runs the other tasks in ``o`` seconds, and it would take ``d`` for all of one kind
    where the host takes ``q``. If it makes a share ``x`` of them, it is busy for ``o + x d``
    seconds, and the host for ``n + (1 - x) q``. Any mean of both, with weights ``a`` and ``1 - a``,
    is no longer than the longer. So no shares make that less than ``a o + (1 - a) n``, and the
    lesser of ``a d`` and ``(1 - a) q`` for each kind.

    Args:
        bound: The fewest bytes that a pass without the host reloads.
        profile: The machine, which knows its host.
    """
    graph, tasks_ns = bound.graph, alone_ns(bound.graph, profile)
    attended = attentions(graph)
    products = [task for task in graph.tasks if task.op in MATMULS]
    on_host = (
        {task.index: task for task in products},
        {unit.task: host_task(graph, unit) for unit in attended},
    )
    kinds = [_kind(graph, profile, tasks_ns, tasks) for tasks in on_host if tasks]
    copied = {task for unit in attended for task in unit.copied}
    others = set(range(len(graph.tasks))) - copied - {t for kind in kinds for t in kind.tasks}
    others_ns, issue_ns = sum(tasks_ns[task] for task in others), len(others) * profile.host_op_ns
    halves = [k.host_ns / (k.device_ns + k.host_ns) for k in kinds]
    means = (
        a * others_ns
        + (1 - a) * issue_ns
        + sum(min(a * k.device_ns, (1 - a) * k.host_ns) for k in kinds)
        for a in (0, 1, *halves)
    )
    link_rate = profile.h2d_bytes_per_s / NS_PER_S
    copies = (
        (bound.nbytes + r * issue_ns - sum(k.nbytes * max(0, 1 - r / k.rate) for k in kinds))
        / (link_rate + r)
        for r in (0, *(k.rate for k in kinds))
    )
    return int(max(*means, *copies))


@dataclass(frozen=True, slots=True)
class _Kind:
    """Tasks of one kind: what they may read in host memory, and what they take here and there."""

    tasks: frozenset[int]
    nbytes: int
    device_ns: int
    host_ns: float

    @property
    def rate(self) -> float:
        """Bytes a nanosecond that the host reads."""
        return self.nbytes / self.host_ns


def _kind(
    graph: TaskGraph, profile: HardwareProfile, tasks_ns: list[int], on_host: Mapping[int, Task]
) -> _Kind:
    """Return what tasks take.

    Args:
        graph: The pass.
        profile: The machine.
        tasks_ns: The time of each task on the device.
        on_host: Tasks by index, as the host computes them.
    """
    reads, known = {b for task in on_host.values() for b in task.reads}, routes(graph)
    used_bytes = sum(
        known[b.id].most_bytes(b.nbytes) if b.id in known else b.nbytes
        for b in graph.buffers
        if b.kind is BufferKind.WEIGHT and b.id in reads
    )
    host_s = sum(
        max(nbytes / profile.host_bytes_per_s, flops / profile.host_flops_per_s)
        for nbytes, flops in (host_work(graph, task) for task in on_host.values())
    )
    device_ns = sum(tasks_ns[task] for task in on_host)
    return _Kind(frozenset(on_host), used_bytes, device_ns, host_s * NS_PER_S)


def alone_ns(graph: TaskGraph, profile: HardwareProfile) -> list[int]:
    """Return the least time of each task on the device.

    A copy to host memory and a task of the host take none.
    """
    costs = Costs(profile)
    return [
        0 if task.op == TO_HOST or task.index in graph.host_tasks else costs.task_ns(graph, task)
        for task in graph.tasks
    ]


def end_times_ns(graph: TaskGraph, profile: HardwareProfile) -> list[int]:
    """Return the times by which each task and all before it end, if none waits for a copy.

    A task of the host runs beside the tasks of the device that read none of its results.

    Args:
        graph: The pass.
        profile: The machine, whose host issues the tasks.
    """
    costs, ready = Costs(profile), dict[int, int]()  # buffer -> when its last writer ends
    issued = device_end = host_end = 0
    found: list[int] = []
    for task, task_ns in zip(graph.tasks, alone_ns(graph, profile), strict=True):
        issued += profile.host_op_ns
        start = max([issued, *(ready.get(b, 0) for b in task.reads)])
        if task.index in graph.host_tasks:
            end = host_end = max(start, host_end) + costs.task_ns(graph, task)
        else:
            end = device_end = max(start, device_end) + task_ns
        for buffer in (*task.writes, *task.touches):
            ready[buffer] = max(end, ready.get(buffer, 0))
        found.append(max(end, found[-1] if found else 0))
    return found


def _least_copies_ns(bound: LowerBound, profile: HardwareProfile, arena_bytes: int) -> int:
    """Return the least time of the copies; each takes its latency beyond its bytes.

    Few copies are large ones. The bytes that a pass does not reload are in the arena all the time,
    and so beside the largest copy of s bytes. Thus at least ``weights - arena + s`` bytes are
    reloaded, by at least that many bytes over s copies. The sum of both is least where s takes the
    link as long as all latencies do.
    """
    reloaded_bytes = bound.nbytes
    if not reloaded_bytes:
        return 0
    latency_bytes = profile.transfer_latency_ns * profile.h2d_bytes_per_s / 1e9
    if not latency_bytes:
        return Costs(profile).copy_ns(Lane.H2D, reloaded_bytes)
    missing_bytes = max(0, bound.needed_bytes - arena_bytes)
    copy_bytes = max(reloaded_bytes - missing_bytes, math.sqrt(latency_bytes * missing_bytes))
    copied_bytes = max(reloaded_bytes, missing_bytes + copy_bytes)
    total_bytes = copied_bytes + latency_bytes * max(1, copied_bytes / copy_bytes)
    return int(total_bytes * 1e9 / profile.h2d_bytes_per_s)


def _least_collects_ns(bound: LowerBound, profile: HardwareProfile) -> int:
    """Return the least time to collect the parts of the other ranks, over the link between them."""
    graph = bound.graph
    weights = (b for b in graph.buffers if b.kind is BufferKind.WEIGHT)
    own_bytes = sum(b.nbytes for b in weights if graph.num_parts(b) == 1)
    whole_bytes = bound.nbytes - bound.per_call_bytes - own_bytes
    if graph.num_ranks == 1 or whole_bytes <= 0:
        return 0
    others_bytes = whole_bytes * (graph.num_ranks - 1) // graph.num_ranks
    return Costs(profile).collect_ns(others_bytes, graph.num_ranks)
