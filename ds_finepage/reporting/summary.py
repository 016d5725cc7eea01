"""What a plan costs, as one object with two renderings: terminal and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rich.table import Table

from ds_finepage.graph.memgraph import MemGraph, NodeKind
from ds_finepage.graph.timeline import Timeline
from ds_finepage.units import format_bytes, format_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """The figures of one plan and its timeline, for one steady pass.

    ``resident_bytes`` are the weights that stay from one pass to the next, ``peak_bytes`` the
    highest arena byte that is used, ``allocated_bytes`` the most that is allocated at one time; the
    difference of the two is fragmentation.
    """

    graph: str
    policy: str
    num_tasks: int
    weight_bytes: int
    external_bytes: int
    workspace_bytes: int
    arena_bytes: int
    peak_bytes: int
    allocated_bytes: int
    resident_bytes: int
    host_bytes: int
    num_reloads: int
    num_offloads: int
    num_drops: int
    reloaded_bytes: int
    offloaded_bytes: int
    lower_bound_bytes: int
    total_ns: int
    compute_ns: int
    transfer_ns: int
    stall_ns: int
    lower_bound_ns: int

    @classmethod
    def of(cls, memgraph: MemGraph, timeline: Timeline, lower_bound_bytes: int) -> PlanSummary:
        """Collect the figures.

        Args:
            memgraph: The plan.
            timeline: The same plan in time, predicted or measured.
            lower_bound_bytes: What any plan of the taskgraph must reload under the same budget.
        """
        graph = memgraph.graph
        times = Counter(node.kind for node in memgraph.nodes)
        return cls(
            graph=graph.name,
            policy=memgraph.policy,
            num_tasks=len(graph.tasks),
            weight_bytes=graph.weight_bytes,
            external_bytes=graph.external_bytes,
            workspace_bytes=graph.workspace_bytes,
            arena_bytes=memgraph.arena_bytes,
            peak_bytes=memgraph.peak_bytes,
            allocated_bytes=timeline.peak_bytes,
            resident_bytes=sum(graph.buffers[r.buffer].nbytes for r in memgraph.exit),
            host_bytes=memgraph.host_bytes,
            num_reloads=times[NodeKind.RELOAD],
            num_offloads=times[NodeKind.OFFLOAD],
            num_drops=times[NodeKind.DROP],
            reloaded_bytes=memgraph.reloaded_bytes,
            offloaded_bytes=memgraph.offloaded_bytes,
            lower_bound_bytes=lower_bound_bytes,
            total_ns=timeline.total_ns,
            compute_ns=timeline.compute_ns,
            transfer_ns=timeline.transfer_ns,
            stall_ns=timeline.stall_ns,
            lower_bound_ns=timeline.lower_bound_ns,
        )

    @property
    def bytes_over_bound(self) -> float | None:
        """Reloaded bytes over the fewest possible; None where nothing has to be reloaded."""
        return self.reloaded_bytes / self.lower_bound_bytes if self.lower_bound_bytes else None

    @property
    def time_over_bound(self) -> float | None:
        """Total time over the least possible for these nodes; None where that is nothing."""
        return self.total_ns / self.lower_bound_ns if self.lower_bound_ns else None

    def to_dict(self) -> dict[str, Any]:
        """Return all figures by name, ready for JSON: integers in bytes and nanoseconds."""
        return {
            **{field.name: getattr(self, field.name) for field in fields(self)},
            "bytes_over_bound": self.bytes_over_bound,
            "time_over_bound": self.time_over_bound,
        }

    def to_table(self) -> Table:
        """Return the figures as a table for the terminal."""
        return comparison_table([self])


def comparison_table(summaries: Sequence[PlanSummary]) -> Table:
    """Return plans side by side, one column each, headed by their policies."""
    graphs = dict.fromkeys(summary.graph for summary in summaries)
    table = Table(title=", ".join(graphs), title_justify="left")
    table.add_column("")
    for summary in summaries:
        table.add_column(summary.policy, justify="right")
    for label, figure in _LINES:
        table.add_row(label, *(figure(summary) for summary in summaries))
    return table


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _times(number: int, nbytes: int) -> str:
    return f"{format_bytes(nbytes)} in {number}" if number else format_bytes(nbytes)


_LINES: tuple[tuple[str, Callable[[PlanSummary], str]], ...] = (
    ("tasks", lambda s: str(s.num_tasks)),
    ("weights", lambda s: format_bytes(s.weight_bytes)),
    ("outside the arena", lambda s: format_bytes(s.external_bytes + s.workspace_bytes)),
    ("arena", lambda s: format_bytes(s.arena_bytes)),
    ("arena, highest byte used", lambda s: format_bytes(s.peak_bytes)),
    ("arena, most allocated", lambda s: format_bytes(s.allocated_bytes)),
    ("weights that stay resident", lambda s: format_bytes(s.resident_bytes)),
    ("pinned host memory", lambda s: format_bytes(s.host_bytes)),
    ("reloaded a pass", lambda s: _times(s.num_reloads, s.reloaded_bytes)),
    ("  least possible", lambda s: format_bytes(s.lower_bound_bytes)),
    ("  reloaded / least", lambda s: _ratio(s.bytes_over_bound)),
    ("offloaded a pass", lambda s: _times(s.num_offloads, s.offloaded_bytes)),
    ("time a pass", lambda s: format_ns(s.total_ns)),
    ("  least possible", lambda s: format_ns(s.lower_bound_ns)),
    ("  time / least", lambda s: _ratio(s.time_over_bound)),
    ("  compute", lambda s: format_ns(s.compute_ns)),
    ("  transfer, busier lane", lambda s: format_ns(s.transfer_ns)),
    ("  stall", lambda s: format_ns(s.stall_ns)),
)
