"""Predicts the time of a memgraph: MemGraph and HardwareProfile in, Timeline out.

Three lanes run side by side, each its own nodes in the order of their ids. The host issues the
nodes of all lanes in that order and never waits. A node starts when the host has issued it, its
lane is free and all its predecessors are complete. Nodes of the other kinds (resident, stored,
alloc, drop) take no time: they are complete when the last of their predecessors is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ds_finepage.errors import ConfigError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import LANE_OF, Lane, MemGraph, Node, NodeKind
from ds_finepage.graph.profiles import DEFAULT_DTYPE, require_usable
from ds_finepage.graph.taskgraph import TO_HOST, Task, TaskGraph
from ds_finepage.graph.timeline import Span, Timeline

_NS_PER_S = 10**9


class _Rate:
    """Units per second as a ratio of integers, so that times are exact and the same anywhere."""

    def __init__(self, per_s: float) -> None:
        self._numerator, denominator = float(per_s).as_integer_ratio()
        self._factor = _NS_PER_S * denominator

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
        }
        self._memory = _Rate(profile.memory_bytes_per_s)
        self._flops = {dtype: _Rate(rate) for dtype, rate in profile.flops_per_s.items()}
        self.links = {
            Lane.H2D: _Rate(profile.h2d_bytes_per_s),
            Lane.D2H: _Rate(profile.d2h_bytes_per_s),
        }

    def task_ns(self, graph: TaskGraph, task: Task) -> int:
        """Return the time of a task on the device."""
        if task.time_ns is not None:
            return task.time_ns
        if task.op == TO_HOST:
            return self.copy_ns(Lane.D2H, sum(graph.buffers[b].nbytes for b in task.writes))
        made = next((t for t in task.results if t is not None), None)
        dtype = DEFAULT_DTYPE if made is None else graph.tensors[made].dtype
        flops = self._flops.get(dtype) or self._flops[DEFAULT_DTYPE]
        return max(flops.ns(task.flops), self._memory.ns(task.moved_bytes), self._launch_ns)

    def copy_ns(self, lane: Lane, nbytes: int, num_copies: int = 1) -> int:
        """Return the time of a copy on its link, or of several that one node makes."""
        return self._latency_ns * num_copies + self.links[lane].ns(nbytes)


def task_time_ns(graph: TaskGraph, task: Task, profile: HardwareProfile) -> int:
    """Return the time of a task: as measured, or the roofline of the profile.

    The roofline is the longest of arithmetic (at the rate for the dtype of the first result),
    traffic in device memory, and launch. A task that writes rows of a KV cache to host memory takes
    as long as that copy.

    Raises:
        ConfigError: The profile has a rate or size that cannot be computed with.
    """
    return Costs(profile).task_ns(graph, task)


def simulate(
    memgraph: MemGraph, profile: HardwareProfile, *, entry_missing: Collection[int] = ()
) -> Timeline:
    """Predict a pass. Pure, and linear in nodes and edges.

    ``peak_bytes`` counts an extent from the completion of its alloc to that of its drop or offload.

    Args:
        memgraph: A plan that passes the checker.
        profile: The machine.
        entry_missing: Buffers of ``memgraph.entry`` that are not in the arena yet, as in the first
            pass: their resident nodes are copies on the h2d lane.

    Raises:
        ConfigError: The profile has a rate or size that cannot be computed with, or
            ``entry_missing`` names a buffer that is not in ``memgraph.entry``.
    """
    costs = Costs(profile)
    missing = _resident(memgraph, entry_missing)
    complete = [0] * len(memgraph.nodes)
    lane_free = dict.fromkeys(Lane, 0)
    compute_ns = 0
    copied = {Lane.H2D: 0, Lane.D2H: 0}
    host_ns = 0
    spans: list[Span] = []
    for node, before in zip(memgraph.nodes, memgraph.predecessors, strict=True):
        ready = max((complete[b] for b in before), default=0)
        loads_late = node.kind is NodeKind.RESIDENT and node.buffer in missing
        lane = Lane.H2D if loads_late else LANE_OF.get(node.kind)
        if lane is None:
            complete[node.id] = ready
            continue
        if lane is Lane.COMPUTE:
            assert node.task is not None
            took, num_calls = costs.task_ns(memgraph.graph, memgraph.graph.tasks[node.task]), 1
        else:
            num_calls = memgraph.copies_at(node)
            took = costs.copy_ns(lane, memgraph.bytes_at(node), num_calls)
            copied[lane] += memgraph.bytes_at(node)
        host_ns += costs.host_ns[lane] * num_calls
        start = max(ready, lane_free[lane], host_ns)
        complete[node.id] = lane_free[lane] = start + took
        compute_ns += took if lane is Lane.COMPUTE else 0
        spans.append(Span(node.id, lane, start, start + took, _span_name(memgraph.graph, node)))

    links_ns = (costs.links[lane].ns(n) for lane, n in copied.items())
    return _timeline(memgraph, spans, complete, lower_bound_ns=max(compute_ns, *links_ns))


def measured_timeline(memgraph: MemGraph, spans: Sequence[Span]) -> Timeline:
    """Return the timeline of a pass that ran.

    Its ``lower_bound_ns`` is the time of its busiest lane.

    Args:
        memgraph: The plan.
        spans: Of the nodes that took time, in the order of their ids.
    """
    nodes, graph = memgraph.nodes, memgraph.graph
    named = [replace(span, name=_span_name(graph, nodes[span.node])) for span in spans]
    ends = {span.node: span.end_ns for span in spans}
    complete: list[int] = []
    for node, before in zip(nodes, memgraph.predecessors, strict=True):
        ready = max((complete[b] for b in before), default=0)
        complete.append(ends.get(node.id, ready))
    found = _timeline(memgraph, named, complete, lower_bound_ns=0)
    return replace(found, lower_bound_ns=max(found.compute_ns, found.transfer_ns))


def _timeline(
    memgraph: MemGraph, spans: Sequence[Span], complete: list[int], *, lower_bound_ns: int
) -> Timeline:
    """Add up spans; ``complete`` has the time at which each node is complete."""
    ends, busy = dict.fromkeys(Lane, 0), dict.fromkeys(Lane, 0)
    for span in spans:
        ends[span.lane] = max(ends[span.lane], span.end_ns)
        busy[span.lane] += span.end_ns - span.start_ns
    return Timeline(
        spans=tuple(spans),
        total_ns=max(ends.values()),
        compute_ns=busy[Lane.COMPUTE],
        transfer_ns=max(busy[Lane.H2D], busy[Lane.D2H]),
        stall_ns=ends[Lane.COMPUTE] - busy[Lane.COMPUTE],
        peak_bytes=_peak_bytes(memgraph, complete),
        lower_bound_ns=lower_bound_ns,
    )


def _resident(memgraph: MemGraph, buffers: Collection[int]) -> frozenset[int]:
    """Return buffers of ``memgraph.entry``.

    Raises:
        ConfigError: One of them is none.
    """
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
