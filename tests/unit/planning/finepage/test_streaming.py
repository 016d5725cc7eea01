"""Which lengths of the ring are tried, and in which order."""

from __future__ import annotations

import dataclasses

import pytest

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph, NodeKind
from ds_finepage.planning.finepage import residency
from ds_finepage.planning.finepage.forecast import Forecast, Plan
from ds_finepage.planning.finepage.residency import RingShape, WeightClasses
from ds_finepage.planning.finepage.ring import place_activations
from ds_finepage.planning.finepage.streaming import streaming_plans
from ds_finepage.planning.layout import top_of
from ds_finepage.planning.liveness import needed_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.embeddings import gather_rows
from tests.property.matmul_chains import matmul_chain
from tests.unit.planning.finepage.test_search import machine

UNIT = 64
GRAPH = gather_rows(matmul_chain([256] * 13, num_rows=4))


def problem(percent: int, latency_ns: int) -> Problem:
    profile: HardwareProfile = machine(h2d=1e9)
    profile = dataclasses.replace(profile, transfer_latency_ns=latency_ns)
    arena_bytes = needed_arena_bytes(GRAPH, UNIT) * percent // 100
    return Problem(GRAPH, arena_bytes, UNIT, profile, split=True)


def written(plan: Plan) -> MemGraph:
    return plan.plan if isinstance(plan, Forecast) else plan


def plans(at: Problem) -> list[MemGraph]:
    found = streaming_plans(at, may_split=True)
    return [written(plan) for plan in found if plan is not None]


def num_copies(plan: MemGraph) -> int:
    return sum(node.kind is NodeKind.RELOAD for node in plan.nodes)


def largest_copy(plan: MemGraph) -> int:
    return max(plan.bytes_at(n) for n in plan.nodes if n.kind is NodeKind.RELOAD)


def test_a_latency_brings_plans_of_fewer_copies() -> None:
    fewest = min(map(num_copies, plans(problem(90, 0))))
    assert min(map(num_copies, plans(problem(90, 20_000)))) < fewest


def test_a_ring_of_one_slice_needs_the_fewest_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    def fewest(num_slices: int) -> int:
        ring = RingShape(262_144, 262_144 // num_slices, 262_144 // num_slices)
        monkeypatch.setattr(WeightClasses, "ring_shapes", lambda *_: iter([ring]))
        return min(map(num_copies, plans(problem(75, 20_000))))

    assert fewest(1) < fewest(2) < fewest(4)


def test_rings_of_one_shape_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [RingShape(65536, 16384)] * 3
    monkeypatch.setattr(WeightClasses, "ring_shapes", lambda *_: iter(shapes))
    assert len(plans(problem(75, 0))) == 1


def test_short_slices_serve_only_where_no_longer_ring_has_room() -> None:
    at = problem(90, 20_000)
    weights = WeightClasses.of(at, may_split=True)
    room = at.arena_bytes
    assert weights.has_short_slices(room, RingShape(80_000, 19_999))
    assert not weights.has_short_slices(room, RingShape(80_000, 20_000))
    late, prompt = plans(problem(90, 60_000)), plans(problem(90, 0))
    assert min(map(largest_copy, late)) > 60_000 > min(map(largest_copy, prompt))
    short = problem(40, 10**9)  # no ring is as long as the latency
    assert plans(short)


def test_many_slices_count_as_short(monkeypatch: pytest.MonkeyPatch) -> None:
    at = problem(50, 1)
    for always_slices, expected in ((500, False), (1, True)):
        monkeypatch.setattr(residency, "ALWAYS_SLICES", always_slices)
        monkeypatch.setattr(residency, "SLICES_A_TASK", 0.01)
        weights = WeightClasses.of(at, may_split=True)
        assert weights.has_short_slices(at.arena_bytes, RingShape(65536, 16384)) is expected


def test_nothing_is_planned_that_cannot_win() -> None:
    asked: list[int] = []

    def may_win(nbytes: int, num_copies: int) -> bool:
        asked.append(nbytes)
        return False

    assert list(streaming_plans(problem(75, 0), may_split=True, may_win=may_win)) == []
    assert asked and min(asked) > 0


@pytest.mark.parametrize("percent", (60, 90))
def test_grained_plans_reload_what_is_missing_and_the_ring(percent: int) -> None:
    at = problem(percent, 20_000)
    for plan in plans(at):
        assert plan.reloaded_bytes >= GRAPH.weight_bytes - at.arena_bytes
        assert plan.peak_bytes <= at.arena_bytes


def test_the_ring_takes_the_room_that_whole_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    unit, activations = 256 * 256 * 4, place_activations(problem(50, 0))
    room = unit * 64 // 10 // UNIT * UNIT
    at = dataclasses.replace(problem(50, 0), arena_bytes=top_of(activations) + room)
    monkeypatch.setattr(residency, "RING_WEIGHTS", (1.5,))
    (found,) = streaming_plans(at, may_split=False)
    assert found is not None
    plan = written(found)
    reloads = [node.extent for node in plan.nodes if node.kind is NodeKind.RELOAD]
    streamed = [extent for extent in reloads if extent is not None and extent.nbytes == unit]
    assert len(streamed) == 8  # 4 are kept, which leaves 2.4 for a ring of 1.5
    assert len(set(streamed)) == 2
