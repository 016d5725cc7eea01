"""The cost of a planned pass in figures, for the terminal and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ds_finepage.graph.collectives import is_collective, traffic_of
from ds_finepage.graph.memgraph import MemGraph, NodeKind
from ds_finepage.graph.taskgraph import TO_HOST, TaskGraph
from ds_finepage.units import NS_PER_S, format_bytes, format_ns


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
    in program order. They let any byte of the weights stay, and any byte of a KV cache in host
    memory, whose copies they include; a cache on the device is there. ``weights`` names
    the packed form of the weights, if they have one; all bytes are then packed bytes. Where a model
    is cut over ``num_ranks``, all figures are of one rank, except tokens a second: all ranks work
    on the same tokens. ``sent_bytes`` is what a rank sends to the next one in the collectives of a
    pass. ``file_bytes`` are those of the reloaded bytes that are read from files, because host
    memory has no room for them, and ``least_file_bytes`` the least possible. ``host_ns`` is the
    time in which the host computes, with ``host_read_bytes`` of weights and rows in its memory.
    Then ``lower_bound_alone_ns`` is the bound of plans in which it computes nothing.
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
    plan_seconds: float
    weights: str | None = None
    num_ranks: int = 1
    sent_bytes: int = 0
    file_bytes: int = 0
    least_file_bytes: int = 0
    host_ns: int = 0
    host_read_bytes: int = 0
    lower_bound_alone_ns: int | None = None

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the whole batch that a steady pass of all ranks makes or reads in a second."""
        tokens = self.batch * (self.seq if self.phase == "prefill" else 1)
        return tokens * NS_PER_S / self.predicted_ns if self.predicted_ns else 0.0

    @property
    def title(self) -> str:
        """Model, pass, policy and machine."""
        return (
            f"{self.model}, {self.phase}, batch {self.batch}, sequence {self.seq}, "
            f"{self.policy} on {self.hardware}{of_ranks(self.num_ranks)}"
        )

    def lines(self) -> list[tuple[str, str | None]]:
        """Return each figure for the terminal, behind its label; None if the plan has none."""
        return [(label, figure(self)) for label, figure in _LINES]


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


def _over(amount: int, bound: int) -> str:
    return f" ({amount / bound:.2f} x)" if bound else ""


def _weights(figures: PlanFigures) -> str:
    form = f" ({figures.weights})" if figures.weights else ""
    return format_bytes(figures.weight_bytes) + form


def _kv_cache(figures: PlanFigures) -> str:
    place = "in host memory" if figures.kv_on_host else "on the device"
    return f"{format_bytes(figures.kv_bytes)} {place}"


_LINES: tuple[tuple[str, Callable[[PlanFigures], str | None]], ...] = (
    ("weights", _weights),
    ("KV cache", _kv_cache),
    ("budget", lambda f: format_bytes(f.budget_bytes)),
    ("  least that can run", lambda f: format_bytes(f.min_budget_bytes)),
    ("  peak", lambda f: format_bytes(f.peak_bytes)),
    ("host memory", lambda f: format_bytes(f.host_bytes)),
    ("reloaded by the first pass", lambda f: format_bytes(f.entry_reloaded_bytes)),
    (
        "reloaded by each pass",
        lambda f: format_bytes(f.reloaded_bytes) + _over(f.reloaded_bytes, f.lower_bound_bytes),
    ),
    ("  least possible, one batch at a time", lambda f: format_bytes(f.lower_bound_bytes)),
    (
        "    may stay by this bound",
        lambda f: "any byte of weights" + (" and KV cache" if f.kv_on_host else ""),
    ),
    (
        "  of these from files",
        lambda f: (
            format_bytes(f.file_bytes) + _over(f.file_bytes, f.least_file_bytes)
            if f.file_bytes
            else None
        ),
    ),
    ("offloaded by each pass", lambda f: format_bytes(f.offloaded_bytes)),
    ("KV cache copied by each pass", lambda f: format_bytes(f.kv_copied_bytes)),
    (
        "time of a pass",
        lambda f: format_ns(f.predicted_ns) + _over(f.predicted_ns, f.lower_bound_ns),
    ),
    ("  least possible, one batch at a time", lambda f: format_ns(f.lower_bound_ns)),
    (
        "  without the host",
        lambda f: format_ns(f.lower_bound_alone_ns) if f.lower_bound_alone_ns else None,
    ),
    ("  compute", lambda f: format_ns(f.compute_ns)),
    ("  computed by the host", lambda f: format_ns(f.host_ns) if f.host_ns else None),
    (
        "  read there",
        lambda f: format_bytes(f.host_read_bytes) if f.host_ns else None,
    ),
    ("  transfer, busier lane", lambda f: format_ns(f.transfer_ns)),
    ("  stall", lambda f: format_ns(f.stall_ns)),
    (
        "sent to the next rank by each pass",
        lambda f: None if f.num_ranks == 1 else format_bytes(f.sent_bytes),
    ),
    ("tokens a second", lambda f: None if f.num_ranks > 1 else f"{f.tokens_per_s:.2f}"),
    (
        "tokens a second, all ranks together",
        lambda f: None if f.num_ranks == 1 else f"{f.tokens_per_s:.2f}",
    ),
    ("tasks", lambda f: str(f.num_tasks)),
    ("planning", lambda f: f"{f.plan_seconds:.2f} s"),
)
