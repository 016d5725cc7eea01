"""The summary of a plan: the right figures, the same in both renderings."""

from __future__ import annotations

import dataclasses
import io
import json

from rich.console import Console
from rich.table import Table

from ds_finepage.graph.memgraph import (
    Edge,
    EdgeKind,
    Extent,
    MemGraph,
    Node,
    NodeKind,
    Residency,
)
from ds_finepage.graph.taskgraph import Buffer, BufferKind, Task, TaskGraph
from ds_finepage.graph.timeline import Timeline
from ds_finepage.reporting.summary import PlanSummary, comparison_table

KIB = 1024


def make_summary(lower_bound_bytes: int = 2 * KIB, lower_bound_ns: int = 2_000) -> PlanSummary:
    graph = TaskGraph(
        "tiny",
        (
            Buffer(0, BufferKind.WEIGHT, 4 * KIB),
            Buffer(1, BufferKind.WEIGHT, 2 * KIB),
            Buffer(2, BufferKind.STATE, KIB),
            Buffer(3, BufferKind.ACTIVATION, KIB),
        ),
        (),
        (Task(0, "a", workspace_bytes=100), Task(1, "b", workspace_bytes=512)),
    )
    kept = Residency(0, Extent(4 * KIB, 4 * KIB))
    nodes = [
        Node(0, NodeKind.RESIDENT, buffer=0, extent=kept.extent),
        Node(1, NodeKind.STORED, buffer=1),
        Node(2, NodeKind.ALLOC, buffer=3, extent=Extent(0, KIB)),
        Node(3, NodeKind.COMPUTE, task=0),
        Node(4, NodeKind.OFFLOAD, buffer=3, extent=Extent(0, KIB)),
    ]
    for start in (5, 8):  # the weight is needed twice
        nodes += [
            Node(start, NodeKind.ALLOC, buffer=1, extent=Extent(0, 2 * KIB)),
            Node(start + 1, NodeKind.RELOAD, buffer=1, extent=Extent(0, 2 * KIB)),
            Node(start + 2, NodeKind.DROP, buffer=1, extent=Extent(0, 2 * KIB)),
        ]
    memgraph = MemGraph(
        graph=graph,
        policy="horizon",
        arena_bytes=10 * KIB,
        alignment=64,
        nodes=tuple(nodes),
        edges=(Edge(0, 3, EdgeKind.DATA),),
        entry=(kept,),
        exit=(kept,),
        host_slots=((3, 0),),
        host_bytes=KIB,
    )
    timeline = Timeline((), 3_000, 2_000, 1_500, 700, 6 * KIB, lower_bound_ns)
    return PlanSummary.of(memgraph, timeline, lower_bound_bytes)


def render(table: Table) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_figures() -> None:
    assert make_summary() == PlanSummary(
        graph="tiny",
        policy="horizon",
        num_tasks=2,
        weight_bytes=6 * KIB,
        external_bytes=KIB,
        workspace_bytes=512,
        arena_bytes=10 * KIB,
        peak_bytes=8 * KIB,
        allocated_bytes=6 * KIB,
        resident_bytes=4 * KIB,
        host_bytes=KIB,
        num_reloads=2,
        num_offloads=1,
        num_drops=2,
        reloaded_bytes=4 * KIB,
        offloaded_bytes=KIB,
        lower_bound_bytes=2 * KIB,
        total_ns=3_000,
        compute_ns=2_000,
        transfer_ns=1_500,
        stall_ns=700,
        lower_bound_ns=2_000,
    )


def test_ratios() -> None:
    summary = make_summary()
    assert summary.bytes_over_bound == 2.0
    assert summary.time_over_bound == 1.5
    unbounded = make_summary(lower_bound_bytes=0, lower_bound_ns=0)
    assert unbounded.bytes_over_bound is None
    assert unbounded.time_over_bound is None


def test_dict_is_json_and_complete() -> None:
    summary = make_summary()
    found = json.loads(json.dumps(summary.to_dict()))
    assert list(found)[:2] == ["graph", "policy"]
    assert found.pop("bytes_over_bound") == 2.0
    assert found.pop("time_over_bound") == 1.5
    assert PlanSummary(**found) == summary
    assert json.loads(json.dumps(make_summary(0, 0).to_dict()))["bytes_over_bound"] is None


def test_table_shows_the_figures() -> None:
    text = render(make_summary().to_table())
    for shown in ("tiny", "horizon", "4.00 KiB in 2", "1.00 KiB in 1", "3.00 us", "2.00", "1.50"):
        assert shown in text
    assert "1.50 KiB" in text  # state and workspace lie outside the arena


def test_table_without_transfers_or_bounds() -> None:
    still = dataclasses.replace(
        make_summary(0, 0), num_reloads=0, reloaded_bytes=0, num_offloads=0, offloaded_bytes=0
    )
    line = next(line for line in render(still.to_table()).splitlines() if "reloaded a pass" in line)
    assert "0 B" in line and "in" not in line
    assert next(s for s in render(still.to_table()).splitlines() if "reloaded / least" in s).count(
        "-"
    )


def test_plans_side_by_side() -> None:
    summary = make_summary()
    other = dataclasses.replace(summary, policy="finepage", total_ns=2_500)
    text = render(comparison_table([summary, other]))
    assert "horizon" in text and "finepage" in text
    line = next(line for line in text.splitlines() if "time a pass" in line)
    assert "3.00 us" in line and "2.50 us" in line
    assert text.count("tiny") == 1
