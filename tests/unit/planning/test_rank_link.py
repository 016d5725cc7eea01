"""The time of a collective: worked out on paper for ranks in a circle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_finepage.graph.collectives import ALL_GATHER, ALL_REDUCE, collects_of
from ds_finepage.graph.memgraph import Lane, MemGraph, NodeKind
from ds_finepage.graph.parts import with_parts
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.finepage.best_plans import BestPlans
from ds_finepage.planning.finepage.search import plan_finepage
from ds_finepage.planning.pipeline import PlanSettings, plan_checked
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.simulator import Costs, simulate
from tests.unit.checker.by_hand import collecting
from tests.unit.graph.test_collectives import graph_of
from tests.unit.graph.test_parts import parted
from tests.unit.planning.sketches import PAGING, plan
from tests.unit.planning.test_simulator import PLAIN

LINKED = replace(PLAIN, rank_bytes_per_s=5e8, rank_latency_ns=10)


@pytest.mark.parametrize(("op", "expected"), [(ALL_REDUCE, 6 * 10 + 384), (ALL_GATHER, 30 + 192)])
def test_steps_and_bytes_take_time(op: str, expected: int) -> None:
    """Of 128 bytes on four ranks each step sends 32, at two nanoseconds a byte."""
    graph = graph_of(op)
    assert Costs(LINKED).task_ns(graph, graph.tasks[0]) == expected


def test_a_link_that_is_not_known_takes_the_time_of_the_traffic_in_memory() -> None:
    graph = graph_of(ALL_REDUCE)
    task = replace(graph.tasks[0], moved_bytes=7000)
    assert Costs(PLAIN).task_ns(graph, task) == 7
    assert Costs(replace(PLAIN, launch_ns=9)).task_ns(graph, task) == 9
    assert Costs(replace(PLAIN, rank_latency_ns=10)).task_ns(graph, task) == 60


def test_a_collect_takes_the_time_of_the_parts_of_the_others() -> None:
    """Of 100 bytes on two ranks 50 come from the other one, in one step."""
    plan_of_one = collecting()
    timeline = simulate(plan_of_one, LINKED)
    reload, collect, task = timeline.spans
    assert [s.lane for s in timeline.spans] == [Lane.H2D, Lane.RANKS, Lane.COMPUTE]
    assert collect.start_ns == reload.end_ns and task.start_ns == collect.end_ns
    assert collect.end_ns - collect.start_ns == 10 + 50 * 2
    assert timeline.transfer_ns == 110


def test_a_weight_that_is_not_in_place_is_collected_when_the_pass_begins() -> None:
    graph = parted(num_weights=1)
    found = plan(graph, arena_bytes=1 << 20, policy="finepage")
    missing = [r.buffer for r in found.entry]
    (late, *_) = simulate(found, LINKED, entry_missing=missing).spans
    assert late.lane is Lane.RANKS
    copied = LINKED.transfer_latency_ns + 128 / LINKED.h2d_bytes_per_s * 1e9
    assert late.end_ns - late.start_ns == round(copied) + 10 + 128 * 2
    assert collects_of(found, missing) != collects_of(found, ())


@pytest.mark.parametrize("policy", PAGING)
def test_every_reload_of_a_part_is_followed_by_its_collect(policy: str) -> None:
    graph = parted(num_weights=6)
    found = plan(graph, arena_bytes=1024, policy=policy)
    weights = [b.id for b in graph.buffers if graph.num_parts(b) > 1]
    reloads = [n for n in found.nodes if n.kind is NodeKind.RELOAD and n.buffer in weights]
    assert reloads
    for node in reloads:
        after = found.nodes[node.id + 1]
        assert (after.kind, after.buffer, after.extent) == ("collect", node.buffer, node.extent)
        assert found.bytes_at(node) == found.bytes_at(after) == 128


def test_bounds_are_those_of_one_rank() -> None:
    """Each of two ranks reloads half of the bytes, over a link of its own."""
    alone = parted(num_weights=6, num_ranks=1)
    settings = PlanSettings(policy="finepage", split=False, alignment=64, profile=LINKED)
    one, two = (plan_checked(g, 1024, settings) for g in (alone, parted(num_weights=6)))
    assert two.lower_bound_bytes == one.lower_bound_bytes // 2 > 0
    slow = replace(settings, profile=replace(LINKED, h2d_bytes_per_s=1e8))
    one_ns, two_ns = (
        plan_checked(g, 1024, slow).lower_bound_ns for g in (alone, parted(num_weights=6))
    )
    assert two_ns <= one_ns // 2 + 1
    assert two.memgraph.reloaded_bytes >= two.lower_bound_bytes


SIZES = (256, 128, 512, 128, 1024, 1024, 1024, 1024, 256, 128, 1024, 128)
FLOPS = (300, 300, 1000, 100, 1000, 300, 300, 1000, 100, 1000, 100, 300)


def uneven(*, num_parted: int = len(SIZES)) -> TaskGraph:
    """Return a chain of tasks with weights of several sizes; the first ones lie on two ranks."""
    graph = parted(num_weights=len(SIZES), num_ranks=1)
    weights = (replace(b, nbytes=n) for b, n in zip(graph.buffers, SIZES, strict=False))
    tasks = (replace(t, flops=n) for t, n in zip(graph.tasks, FLOPS, strict=True))
    graph = replace(graph, buffers=(*weights, *graph.buffers[len(SIZES) :]), tasks=tuple(tasks))
    return with_parts(graph, {f"b{i}": SIZES[i] for i in range(num_parted)}, 2)


def num_collects(plan_of_pass: MemGraph) -> int:
    return sum(n.kind is NodeKind.COLLECT for n in plan_of_pass.nodes)


def test_the_link_between_ranks_decides_which_plan_is_chosen() -> None:
    """Where a collect takes long, weights stream in few collects, though they hide less well."""
    settings = PlanSettings(policy="finepage", split=False, alignment=64, profile=PLAIN)
    linked = replace(settings, profile=replace(PLAIN, rank_latency_ns=2000))
    blind, seeing = (plan_checked(uneven(), 2560, s).memgraph for s in (settings, linked))
    assert num_collects(seeing) < num_collects(blind)
    times = [[simulate(p, s.profile).total_ns for p in (blind, seeing)] for s in (settings, linked)]
    assert times[0][0] < times[0][1] and times[1][1] < 0.9 * times[1][0]


@pytest.mark.parametrize("num_parted", [1, 6, len(SIZES)])
def test_no_plan_beats_the_bound_of_its_collects(num_parted: int) -> None:
    """Each byte that comes from the other rank takes ten nanoseconds, and the first step ten."""
    slow = replace(PLAIN, rank_bytes_per_s=1e8, rank_latency_ns=10)
    settings = PlanSettings(policy="finepage", split=False, alignment=64, profile=slow)
    found = plan_checked(uneven(num_parted=num_parted), 2560, settings)
    assert found.lower_bound_ns <= found.timeline.total_ns
    own_bytes = sum(SIZES[num_parted:])
    whole_bytes = found._bound.nbytes - own_bytes
    expected = 10 + 10 * (whole_bytes // 2) if whole_bytes > 0 else 0
    assert found.lower_bound_ns == max(expected, sum(FLOPS))
    assert (expected > sum(FLOPS)) == (num_parted > 1)


def test_few_bytes_are_those_of_one_rank() -> None:
    problem = Problem(uneven(), 2560, 64, PLAIN)
    alone = replace(problem, graph=replace(problem.graph, parted=(), num_ranks=1))
    assert BestPlans(problem).few_bytes == BestPlans(alone).few_bytes / 2 > 0


def test_two_ranks_reload_twice_as_fast() -> None:
    problem = Problem(uneven(), 2560, 64, replace(PLAIN, transfer_latency_ns=1))
    search = BestPlans(problem)
    search.offer(plan_finepage(problem))
    (found,) = search.tried
    moved, fastest_ns = found.moved_bytes, found.total_ns
    assert search.may_win(198 * fastest_ns // 100, 0)  # PLAIN copies a byte in a nanosecond
    assert search.may_win(2 * moved - 2, fastest_ns - moved)
    assert not search.may_win(2 * moved, fastest_ns - moved)
    assert not search.may_win(3 * fastest_ns, 0)
