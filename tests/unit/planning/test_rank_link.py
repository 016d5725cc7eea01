"""The time of a collective: worked out on paper for ranks in a circle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_finepage.graph.collectives import ALL_GATHER, ALL_REDUCE, collects_of
from ds_finepage.graph.memgraph import Lane, NodeKind
from ds_finepage.planning.pipeline import PlanSettings, plan_checked
from ds_finepage.planning.policies import PAGING, plan
from ds_finepage.planning.simulator import simulate, task_time_ns
from tests.unit.checker.by_hand import collecting
from tests.unit.graph.test_collectives import graph_of
from tests.unit.graph.test_parts import parted
from tests.unit.planning.test_simulator import PLAIN

LINKED = replace(PLAIN, rank_bytes_per_s=5e8, rank_latency_ns=10)


@pytest.mark.parametrize(("op", "expected"), [(ALL_REDUCE, 6 * 10 + 384), (ALL_GATHER, 30 + 192)])
def test_steps_and_bytes_take_time(op: str, expected: int) -> None:
    """Of 128 bytes on four ranks each step sends 32, at two nanoseconds a byte."""
    graph = graph_of(op)
    assert task_time_ns(graph, graph.tasks[0], LINKED) == expected


def test_a_link_that_is_not_known_takes_the_time_of_the_traffic_in_memory() -> None:
    graph = graph_of(ALL_REDUCE)
    task = replace(graph.tasks[0], moved_bytes=7000)
    assert task_time_ns(graph, task, PLAIN) == 7
    assert task_time_ns(graph, task, replace(PLAIN, launch_ns=9)) == 9
    assert task_time_ns(graph, task, replace(PLAIN, rank_latency_ns=10)) == 60


def test_a_collect_takes_the_time_of_the_parts_of_the_others() -> None:
    """Of 100 bytes on two ranks 50 come from the other one, in one step."""
    plan_of_one = collecting()
    timeline = simulate(plan_of_one, LINKED)
    reload, collect, task = timeline.spans
    assert [s.lane for s in timeline.spans] == [Lane.H2D, Lane.RANKS, Lane.COMPUTE]
    assert collect.start_ns == reload.end_ns and task.start_ns == collect.end_ns
    assert collect.end_ns - collect.start_ns == 10 + 50 * 2
    assert timeline.lower_bound_ns >= 110


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
