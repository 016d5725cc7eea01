"""A lower bound on the time of a pass."""

from __future__ import annotations

import math
from dataclasses import replace

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.host_work import host_work
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import TO_HOST, BufferKind, TaskGraph
from ds_finepage.planning.bounds import LowerBound
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
    """Return a time that no steady pass beats in which the host may compute products.

    The host issues the tasks that are no products, in ``n`` seconds, and computes nothing
    meanwhile. In the rest of ``t`` seconds it multiplies at rate ``r``, while the link copies all
    the time, at rate ``l``. They read the missing ``m`` bytes of weights between them, so
    ``l t + r (t - n) >= m``. The bytes that no product reads are copied.

    The device runs the tasks that are no products in ``o`` seconds, and it would take ``d`` for all
    products where the host takes ``q``. If it makes a share ``x`` of them, it is busy for
    ``o + x d`` seconds, and the host for ``n + (1 - x) q``. No share makes the longer less than the
    one at which both are equal.

    Args:
        bound: The fewest bytes that a pass without the host reloads.
        profile: The machine, which knows its host.
    """
    graph, tasks_ns = bound.graph, alone_ns(bound.graph, profile)
    products = [task for task in graph.tasks if task.op in MATMULS]
    reads, known = {b for task in products for b in task.reads}, routes(graph)
    used_bytes = sum(
        known[b.id].most_bytes(b.nbytes) if b.id in known else b.nbytes
        for b in graph.buffers
        if b.kind is BufferKind.WEIGHT and b.id in reads
    )
    device_ns = sum(tasks_ns[task.index] for task in products)
    host_s = sum(
        max(nbytes / profile.host_bytes_per_s, flops / profile.host_flops_per_s)
        for nbytes, flops in (host_work(graph, task) for task in products)
    )
    others_ns, host_ns = sum(tasks_ns) - device_ns, host_s * NS_PER_S
    issue_ns = (len(graph.tasks) - len(products)) * profile.host_op_ns
    equal = (issue_ns + host_ns - others_ns) / max(1, device_ns + host_ns)
    link_rate, host_rate = profile.h2d_bytes_per_s / NS_PER_S, used_bytes / max(1, host_ns)
    return int(
        max(
            others_ns + min(1, max(0, equal)) * device_ns,
            issue_ns,
            (bound.nbytes + host_rate * issue_ns) / (link_rate + host_rate),
            (bound.nbytes - used_bytes) / link_rate,
        )
    )


def alone_ns(graph: TaskGraph, profile: HardwareProfile) -> list[int]:
    """Return the least time of each task on the device.

    A copy to host memory and a product of the host take none.
    """
    costs = Costs(profile)
    return [
        0 if task.op == TO_HOST or task.index in graph.host_tasks else costs.task_ns(graph, task)
        for task in graph.tasks
    ]


def end_times_ns(graph: TaskGraph, profile: HardwareProfile) -> list[int]:
    """Return the times by which each task and all before it end, if none waits for a copy.

    A product of the host runs beside the tasks of the device that read none of its results.

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
