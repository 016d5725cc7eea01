"""Predicts the time of a memgraph: MemGraph and HardwareProfile in, Timeline out.

The lanes run side by side, each its own nodes in the order of their ids. A read of the
disk lane also goes over the link, which takes a small part of its time. The host issues the
nodes of all lanes in that order, and waits for none but the tasks that it computes itself. A node
starts when the host has issued it, its lane is free and all its predecessors are complete. Nodes of
the other kinds (resident, alloc, drop) take no time: they are complete when the last of their
predecessors is.

On a CPU, ops and copies share memory and small copies are slow, which no figure here counts: a pass
may take 1.5 times as long as predicted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ds_finepage.errors import ConfigError
from ds_finepage.graph.collectives import is_collective, traffic_of
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.host_work import host_work
from ds_finepage.graph.memgraph import Lane, MemGraph, Node, NodeKind, lane_of_late
from ds_finepage.graph.profiles import DEFAULT_DTYPE, require_usable
from ds_finepage.graph.taskgraph import TO_HOST, Task, TaskGraph
from ds_finepage.graph.timeline import Span, Timeline
from ds_finepage.units import NS_PER_S


class _Rate:
    """Units per second as a ratio of integers, so that times are exact and the same anywhere."""

    def __init__(self, per_s: float) -> None:
        self._numerator, denominator = float(per_s).as_integer_ratio()
        self._factor = NS_PER_S * denominator

    def ns(self, amount: int) -> int:
        """Return the time for an amount, rounded up: no sum of parts is less than the whole."""
        return -(-amount * self._factor // self._numerator)


class Costs:
    """Times of tasks and copies on one machine.

    Attributes:
        links: Lane -> bytes per second.
        host_ns: Lane -> time of the host to issue a node.
    """

    def __init__(self, profile: HardwareProfile) -> None:
        """Take the figures of a machine.

        Raises:
            ConfigError: A rate or size cannot be computed with.
        """
        require_usable(profile)
        self._launch_ns = profile.launch_ns
        self._latency_ns = profile.transfer_latency_ns
        self.host_ns = {
            Lane.COMPUTE: profile.host_op_ns,
            Lane.H2D: profile.host_copy_ns,
            Lane.D2H: profile.host_copy_ns,
            Lane.RANKS: profile.host_op_ns,
            Lane.DISK: 0,  # a thread of its own
            Lane.HOST: profile.host_op_ns,
        }
        self._host = None
        if profile.has_host:
            self._host = _Rate(profile.host_bytes_per_s), _Rate(profile.host_flops_per_s)
        self._memory = _Rate(profile.memory_bytes_per_s)
        self._ranks = _Rate(profile.rank_bytes_per_s) if profile.rank_bytes_per_s else None
        self._rank_latency_ns = profile.rank_latency_ns
        self._flops = {dtype: _Rate(rate) for dtype, rate in profile.flops_per_s.items()}
        link = profile.h2d_bytes_per_s
        self.links = {
            Lane.H2D: _Rate(profile.h2d_bytes_per_s),
            Lane.D2H: _Rate(profile.d2h_bytes_per_s),
            Lane.DISK: _Rate(min(profile.disk_bytes_per_s or link, link)),
        }

    def task_ns(self, graph: TaskGraph, task: Task) -> int:
        """Return the time of a task on the device: as measured, or the roofline of the profile.

        The roofline is the longest of arithmetic (at the rate for the dtype of the first result),
        traffic in device memory, and launch. A task that writes rows of a KV cache to host memory
        takes as long as that copy.
        """
        if task.index in graph.host_tasks:
            return self.host_product_ns(*host_work(graph, task))
        if task.time_ns is not None:
            return task.time_ns
        if is_collective(task):
            return self._collective_ns(graph, task)
        if task.op == TO_HOST:
            return self.copy_ns(Lane.D2H, sum(graph.buffers[b].nbytes for b in task.writes))
        made = next((t for t in task.results if t is not None), None)
        dtype = DEFAULT_DTYPE if made is None else graph.tensors[made].dtype
        flops = self._flops.get(dtype) or self._flops[DEFAULT_DTYPE]
        return max(flops.ns(task.flops), self._memory.ns(task.moved_bytes), self._launch_ns)

    def _collective_ns(self, graph: TaskGraph, task: Task) -> int:
        """Return the time of a collective: of its steps, and of the bytes that a rank sends."""
        num_steps, nbytes = traffic_of(graph, task)
        own_ns = max(self._memory.ns(task.moved_bytes), self._launch_ns)
        return max(self._ranks_ns(num_steps, nbytes), own_ns)

    def host_product_ns(self, nbytes: int, flops: int) -> int:
        """Return the time of a product that the host computes, with a weight in its memory.

        The activations come down and go up by a copy each, and the host waits for the first one.

        Args:
            nbytes: That the product reads and writes; of experts, those that it may use.
            flops: Of the product.

        Raises:
            ConfigError: The profile does not know the host.
        """
        if self._host is None:
            raise ConfigError("the profile has no host_bytes_per_s and host_flops_per_s; add them")
        memory, arithmetic = self._host
        return 3 * self._latency_ns + max(memory.ns(nbytes), arithmetic.ns(flops))

    def collect_ns(self, nbytes: int, num_ranks: int) -> int:
        """Return the time to collect the parts of a weight from the other ranks.

        Args:
            nbytes: The bytes that come from them.
            num_ranks: The ranks that have parts.
        """
        return self._ranks_ns(num_ranks - 1, nbytes)

    def _ranks_ns(self, num_steps: int, nbytes: int) -> int:
        """Return the time of a transfer between ranks that sends some bytes in some steps."""
        sent_ns = 0 if self._ranks is None else self._ranks.ns(nbytes)
        return num_steps * self._rank_latency_ns + sent_ns

    def copy_ns(self, lane: Lane, nbytes: int, num_copies: int = 1) -> int:
        """Return the time of a copy on its link, or of several that one node makes."""
        return self._latency_ns * num_copies + self.links[lane].ns(nbytes)


def simulate(
    memgraph: MemGraph,
    profile: HardwareProfile,
    *,
    entry_missing: Collection[int] = (),
    begin_ns: int = 0,
) -> Timeline:
    """Predict a pass. Pure, and linear in nodes and edges.

    ``peak_bytes`` counts an extent from the completion of its alloc to that of its drop or offload.

    Args:
        memgraph: A plan that passes the checker.
        profile: The machine.
        entry_missing: Buffers of ``memgraph.entry`` that are not in the arena yet, as in the first
            pass: their resident nodes are copies on the h2d lane.
        begin_ns: When the lanes begin: the time that a call takes before its pass.

    Raises:
        ConfigError: The profile has a rate or size that cannot be computed with, or
            ``entry_missing`` names a buffer that is not in ``memgraph.entry``.
    """
    work = _work(memgraph, Costs(profile), _resident(memgraph, entry_missing), begin_ns)
    starts, complete = _in_order(memgraph, work, begin_ns)
    spans = [
        Span(n.id, w.lane, start, end, _span_name(memgraph.graph, n))
        for n, w, start, end in zip(memgraph.nodes, work, starts, complete, strict=True)
        if w.lane is not None
    ]
    return _timeline(memgraph, spans, complete)


def predicted_ns(memgraph: MemGraph, profile: HardwareProfile) -> int:
    """Predict the time of a pass alone, in less time than :func:`simulate`.

    Args:
        memgraph: A plan that passes the checker.
        profile: The machine.

    Returns:
        ``total_ns`` of the timeline.

    Raises:
        ConfigError: The profile has a rate or size that cannot be computed with.
    """
    work = _work(memgraph, Costs(profile), (), 0)
    _, complete = _in_order(memgraph, work, 0)
    ends = (end for end, w in zip(complete, work, strict=True) if w.lane is not None)
    return max(ends, default=0)


@dataclass(frozen=True, slots=True)
class _Work:
    """The lane of one node, its time there, and when the host has issued it.

    ``lane`` is None for a node that takes no time.
    """

    lane: Lane | None
    took_ns: int = 0
    issued_ns: int = 0
    copy_ns: int = 0  # of a read: its copy to the device


_NO_WORK = _Work(None)


def _work(memgraph: MemGraph, costs: Costs, missing: Collection[int], begin_ns: int) -> list[_Work]:
    """Return what each node needs; buffers in ``missing`` are copied when the pass begins."""
    graph, issued_ns = memgraph.graph, begin_ns
    found = []
    for node in memgraph.nodes:
        loads_late = node.kind is NodeKind.RESIDENT and node.buffer in missing
        lane = lane_of_late(memgraph, node) if loads_late else memgraph.lane_of(node)
        if lane is None:
            found.append(_NO_WORK)
            continue
        if node.task is not None:
            took, num_calls = costs.task_ns(graph, graph.tasks[node.task]), 1
        elif lane is Lane.RANKS:
            took, num_calls = _collect_ns(memgraph, costs, node, loads_late=loads_late), 1
        else:
            num_calls = memgraph.copies_at(node)
            took = costs.copy_ns(lane, memgraph.bytes_at(node), num_calls)
        issued_ns += costs.host_ns[lane if node.task is None else Lane.COMPUTE] * num_calls
        is_read = lane is Lane.DISK
        copy_ns = costs.copy_ns(Lane.H2D, memgraph.bytes_at(node)) if is_read else 0
        found.append(_Work(lane, took, issued_ns, copy_ns))
    return found


def _collect_ns(memgraph: MemGraph, costs: Costs, node: Node, *, loads_late: bool) -> int:
    """Return the time of a collect; one that loads late also copies this rank's part."""
    assert node.buffer is not None
    buffer = memgraph.graph.buffers[node.buffer]
    num_ranks = memgraph.graph.num_parts(buffer)
    part_bytes = buffer.nbytes // num_ranks
    copy_ns = costs.copy_ns(Lane.H2D, part_bytes) if loads_late else 0
    return copy_ns + costs.collect_ns(buffer.nbytes - part_bytes, num_ranks)


def _in_order(
    memgraph: MemGraph, work: Sequence[_Work], begin_ns: int
) -> tuple[list[int], list[int]]:
    """Return when each node begins and is complete."""
    starts, complete = [0] * len(work), [0] * len(work)
    lane_free = dict.fromkeys(Lane, begin_ns)
    late_ns = 0  # that the host issues nodes later, because it computed tasks meanwhile
    for node, before in enumerate(memgraph.predecessors):
        ready = 0
        for b in before:  # a generator for ``max`` takes twice the time
            if complete[b] > ready:
                ready = complete[b]
        lane = work[node].lane
        if lane is None:
            complete[node] = ready
            continue
        if lane is Lane.DISK:  # the disk reads one weight ahead, while it has no place yet
            starts[node] = lane_free[lane]
            end = starts[node] + work[node].took_ns
            complete[node] = max(end, ready + work[node].copy_ns)
            lane_free[lane] = max(end, ready)
            lane_free[Lane.H2D] += work[node].copy_ns  # pieces of it go between other copies
            continue
        starts[node] = max(ready, lane_free[lane], work[node].issued_ns + late_ns)
        complete[node] = lane_free[lane] = starts[node] + work[node].took_ns
        if lane is Lane.HOST:
            late_ns = max(late_ns, complete[node] - work[node].issued_ns)
    return starts, complete


def measured_timeline(memgraph: MemGraph, spans: Sequence[Span], *, begin_ns: int = 0) -> Timeline:
    """Return the timeline of a pass that ran.

    Args:
        memgraph: The plan.
        spans: Of the nodes that took time, in the order of their ids; times since the lanes began.
        begin_ns: When the lanes began.
    """
    nodes, graph = memgraph.nodes, memgraph.graph
    named = [
        Span(
            span.node,
            span.lane,
            begin_ns + span.start_ns,
            begin_ns + span.end_ns,
            _span_name(graph, nodes[span.node]),
        )
        for span in spans
    ]
    ends = {span.node: span.end_ns for span in named}
    complete: list[int] = []
    for node, before in zip(nodes, memgraph.predecessors, strict=True):
        ready = max((complete[b] for b in before), default=0)
        complete.append(ends.get(node.id, ready))
    return _timeline(memgraph, named, complete)


def _timeline(memgraph: MemGraph, spans: Sequence[Span], complete: list[int]) -> Timeline:
    """Add up spans; ``complete`` has the time at which each node is complete."""
    ends, busy = dict.fromkeys(Lane, 0), dict.fromkeys(Lane, 0)
    for span in spans:
        ends[span.lane] = max(ends[span.lane], span.end_ns)
        busy[span.lane] += span.end_ns - span.start_ns
    return Timeline(
        spans=tuple(spans),
        total_ns=max(ends.values()),
        compute_ns=busy[Lane.COMPUTE],
        transfer_ns=max(busy[lane] for lane in Lane if lane not in (Lane.COMPUTE, Lane.HOST)),
        stall_ns=ends[Lane.COMPUTE] - busy[Lane.COMPUTE],
        peak_bytes=_peak_bytes(memgraph, complete),
    )


def _resident(memgraph: MemGraph, buffers: Collection[int]) -> frozenset[int]:
    """Return buffers of ``memgraph.entry``; refuse others."""
    unknown = set(buffers) - {residency.buffer for residency in memgraph.entry}
    if unknown:
        raise ConfigError(
            f"entry_missing names buffers {sorted(unknown)}, which the plan does not find resident"
        )
    return frozenset(buffers)


def _span_name(graph: TaskGraph, node: Node) -> str:
    if node.task is not None:
        return graph.tasks[node.task].where
    assert node.buffer is not None
    verb = NodeKind.RELOAD if node.kind is NodeKind.RESIDENT else node.kind
    return f"{verb.value} {graph.buffers[node.buffer].name or f'buffer {node.buffer}'}"


def _peak_bytes(memgraph: MemGraph, complete: list[int]) -> int:
    """Return the largest sum of allocated extents.

    At equal times the order of ids decides. It is a topological order, so bytes that are used again
    are freed first, and an extent that lives no time still counts.
    """
    changes: list[tuple[int, int, int]] = []  # time, node, bytes taken or given back
    for node in memgraph.nodes:
        if node.extent is None:
            continue
        if node.kind is NodeKind.RESIDENT:
            # Its bytes are taken from the start, even while they are still being copied.
            changes.append((0, node.id, node.extent.nbytes))
        elif node.kind is NodeKind.ALLOC:
            changes.append((complete[node.id], node.id, node.extent.nbytes))
        elif node.kind in (NodeKind.DROP, NodeKind.OFFLOAD):
            changes.append((complete[node.id], node.id, -node.extent.nbytes))
    allocated = peak = 0
    for _, _, change in sorted(changes):
        allocated += change
        peak = max(peak, allocated)
    return peak
