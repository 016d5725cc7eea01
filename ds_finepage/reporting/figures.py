"""The cost of a planned pass in figures, for the terminal and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ds_finepage.graph.collectives import is_collective, traffic_of
from ds_finepage.graph.memgraph import EdgeKind, MemGraph, NodeKind
from ds_finepage.graph.taskgraph import TO_HOST, TaskGraph

NS_PER_S = 10**9

IN_TITLE = ("model", "phase", "batch", "seq", "policy", "hardware", "num_ranks")
"""Figures of a plan that its title names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """One plan of one pass under one budget on one machine, in the order of the JSON.

    ``reloaded_bytes`` and the later figures are of a steady pass. ``entry_reloaded_bytes`` is of
    the first pass, which finds nothing resident. ``peak_bytes`` is the most device memory: the
    arena up to its highest byte in use, plus the non-arena bytes. ``host_bytes`` is the host memory
    for weights, offloaded buffers and a KV cache there. ``kv_copied_bytes`` has the copies of such
    a cache in both directions; its rows that are brought in are part of ``reloaded_bytes`` too.
    ``min_budget_bytes`` is for the place that needs less. ``lower_bound_bytes`` and
    ``lower_bound_ns`` hold for schedules of one batch at a time under the same budget, with tasks
    in program order and the KV cache where it is, and include its copies. ``weights`` names
    the packed form of the weights, if they have one; all bytes are then packed bytes. Where a model
    is cut over ``num_ranks``, all figures are of one rank, except tokens a second: all ranks work
    on the same tokens. ``sent_bytes`` is what a rank sends to the next one in the collectives of a
    pass.
    """

    model: str
    phase: str
    batch: int
    seq: int
    policy: str
    hardware: str
    weight_bytes: int
    kv_bytes: int
    kv_on_host: bool
    budget_bytes: int
    min_budget_bytes: int
    peak_bytes: int
    host_bytes: int
    entry_reloaded_bytes: int
    reloaded_bytes: int
    offloaded_bytes: int
    kv_copied_bytes: int
    lower_bound_bytes: int
    predicted_ns: int
    compute_ns: int
    transfer_ns: int
    lower_bound_ns: int
    stall_ns: int
    num_tasks: int
    num_memory_dependencies: int
    capture_seconds: float
    plan_seconds: float
    layout_overhead: float
    weights: str | None = None
    num_ranks: int = 1
    sent_bytes: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the whole batch that a steady pass of all ranks makes or reads in a second."""
        tokens = self.batch * (self.seq if self.phase == "prefill" else 1)
        return tokens * NS_PER_S / self.predicted_ns if self.predicted_ns else 0.0

    @property
    def title(self) -> str:
        """Model, phase, shape, policy and machine."""
        return (
            f"{self.model}, {self.phase}, batch {self.batch}, sequence {self.seq}, "
            f"{self.policy} on {self.hardware}{of_ranks(self.num_ranks)}"
        )

    def shown(self) -> dict[str, Any]:
        """Return the figures that the title does not name, by name, with what follows from them."""
        return {
            **{f.name: getattr(self, f.name) for f in fields(self) if f.name not in IN_TITLE},
            "tokens_per_s": self.tokens_per_s,
            "reloaded_above_bound_share": _above(self.reloaded_bytes, self.lower_bound_bytes),
            "predicted_above_bound_share": _above(self.predicted_ns, self.lower_bound_ns),
        }


def of_ranks(num_ranks: int) -> str:
    """Return what a title says of a model that is cut over ranks; nothing of a whole one."""
    return "" if num_ranks == 1 else f", each of {num_ranks} ranks"


def sent_bytes(graph: TaskGraph) -> int:
    """Return the bytes that a rank sends to the next one in the collectives of a pass."""
    return sum(traffic_of(graph, task)[1] for task in graph.tasks if is_collective(task))


def written_bytes(graph: TaskGraph) -> int:
    """Return the bytes that a pass's tasks write to host memory: new rows of its KV cache."""
    written = [b for task in graph.tasks if task.op == TO_HOST for b in task.writes]
    return sum(graph.buffers[b].nbytes for b in written)


def kv_reloaded_bytes(memgraph: MemGraph) -> int:
    """Return the bytes that a plan reloads of a KV cache in host memory."""
    buffers = memgraph.graph.buffers
    return sum(
        memgraph.bytes_at(node)
        for node in memgraph.nodes
        if node.kind is NodeKind.RELOAD
        and node.buffer is not None
        and memgraph.graph.is_handed(buffers[node.buffer])
    )


def entry_bytes(memgraph: MemGraph) -> int:
    """Count the bytes that are resident when a steady pass begins."""
    return sum(memgraph.graph.buffers[r.buffer].nbytes for r in memgraph.entry)


def num_memory_dependencies(memgraph: MemGraph) -> int:
    """Count the memory dependencies."""
    return sum(edge.kind is EdgeKind.MEMORY for edge in memgraph.edges)


def largest_live_bytes(memgraph: MemGraph) -> int:
    """Return the largest sum of extents that are allocated together, in the order of nodes."""
    live = largest = 0
    for node in memgraph.nodes:
        if node.extent is None:
            continue
        if node.kind in (NodeKind.RESIDENT, NodeKind.ALLOC):
            live += node.extent.nbytes
            largest = max(largest, live)
        elif node.kind in (NodeKind.DROP, NodeKind.OFFLOAD):
            live -= node.extent.nbytes
    return largest


def layout_overhead(memgraph: MemGraph) -> float:
    """Return the highest arena byte in use over the largest sum of live bytes, at least 1."""
    live = largest_live_bytes(memgraph)
    return memgraph.peak_bytes / live if live else 1.0


def _above(amount: int, bound: int) -> float | None:
    return amount / bound - 1 if bound else None
