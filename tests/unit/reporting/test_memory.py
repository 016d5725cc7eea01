"""Memory of a plan by kind: nothing is lost, and nothing is counted twice."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.planning.pipeline import plan_checked
from ds_finepage.planning.simulator import simulate
from ds_finepage.reporting.layers import bytes_by_layer
from ds_finepage.reporting.memory import MemoryKind, memory_over_time, stalls
from tests.unit.planning.sketches import sketch
from tests.unit.reporting.folders import planned

GRAPH = sketch("w0:64 w1:64 s:128 i:32 a:64", "w0 i -> a", "w1 s a -> a s")


def small_plan() -> MemGraph:
    tasks = tuple(replace(task, workspace_bytes=8) for task in GRAPH.tasks)
    settings = replace(planned().settings, policy="finepage")
    return plan_checked(replace(GRAPH, tasks=tasks), 192, settings).memgraph


def test_each_kind_is_counted_while_each_task_runs() -> None:
    memgraph = small_plan()
    series = memory_over_time(memgraph, simulate(memgraph, planned().settings.profile))
    assert {kind: max(values) for kind, values in series.nbytes.items()} == {
        MemoryKind.RESIDENT: 128,
        MemoryKind.STREAMED: 0,
        MemoryKind.KV: 128,
        MemoryKind.ACTIVATION: 64,
        MemoryKind.WORKSPACE: 8,
        MemoryKind.OTHER: 32,
    }
    assert series.nbytes[MemoryKind.WORKSPACE] == (0, 8, 0, 8, 0)  # two tasks
    assert series.peak_bytes == 360


def test_streamed_weights_come_and_go_beside_resident_ones() -> None:
    found = planned()
    memgraph = found.memgraph
    series = memory_over_time(memgraph, found.timeline)
    resident = {r.buffer for r in memgraph.entry if r in memgraph.exit}
    assert set(series.nbytes[MemoryKind.RESIDENT]) == {64 * len(resident)}
    assert 64 in series.nbytes[MemoryKind.ACTIVATION]
    assert 64 in series.nbytes[MemoryKind.STREAMED]


def test_over_time_it_never_exceeds_the_arena_and_covers_the_pass() -> None:
    for policy in ("finepage", "lru", "horizon"):
        found = planned(policy)
        series = memory_over_time(found.memgraph, found.timeline)
        assert all(a < b for a, b in pairwise(series.at))
        assert series.at[0] == 0 and series.at[-1] == found.timeline.total_ns
        assert 0 < series.peak_bytes <= found.memgraph.arena_bytes
        assert min(map(min, series.nbytes.values())) >= 0


def test_demand_paging_keeps_weights_until_their_room_is_needed() -> None:
    found = planned("lru")
    series = memory_over_time(found.memgraph, found.timeline)
    # After the last of nine weights, four of five places still hold weights.
    assert series.nbytes[MemoryKind.STREAMED][-2] >= 3 * 64


def test_stalls_are_the_gaps_of_the_compute_lane() -> None:
    timeline = planned().timeline
    found = stalls(timeline)
    assert found and sum(end - begin for begin, end in found) == timeline.stall_ns
    assert stalls(replace(timeline, spans=())) == []


def test_layers_are_blocks_of_modules() -> None:
    memgraph = small_plan()
    names = ("m.layers.0.q.weight", "m.layers.0.v.weight")
    buffers = tuple(
        replace(b, name=names[b.id] if b.id < 2 else b.name) for b in memgraph.graph.buffers
    )
    graph = replace(memgraph.graph, buffers=buffers)
    assert bytes_by_layer(replace(memgraph, graph=graph)) == {"m.layers.0": [128, 0]}


def test_all_weights_are_in_some_layer() -> None:
    memgraph = planned().memgraph
    layers = bytes_by_layer(memgraph)
    assert sum(map(sum, layers.values())) == 9 * 64
    assert sum(missing for _, missing in layers.values()) == memgraph.reloaded_bytes
    assert list(layers) == [f"w{i}" for i in range(9)]
