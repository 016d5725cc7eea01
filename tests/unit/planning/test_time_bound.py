"""No plan is faster than the bound of time."""

from __future__ import annotations

import dataclasses

import pytest

from ds_finepage.planning.bounds import lower_bound
from ds_finepage.planning.finepage.search import plan_finepage
from ds_finepage.planning.liveness import needed_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.embeddings import gather_rows
from ds_finepage.planning.simulator import simulate
from ds_finepage.planning.time_bound import alone_ns, end_times_ns, least_time_ns
from tests.property.matmul_chains import matmul_chain
from tests.unit.planning.finepage.test_search import machine
from tests.unit.planning.sketches import chain

UNIT = 64
GRAPH = gather_rows(matmul_chain([256] * 13, num_rows=4))


@pytest.mark.parametrize("latency_ns", (0, 1000, 50_000, 10**6))
@pytest.mark.parametrize("percent", (40, 60, 75, 90, 99))
def test_no_plan_is_faster(percent: int, latency_ns: int) -> None:
    profile = dataclasses.replace(machine(h2d=1e9), transfer_latency_ns=latency_ns, host_op_ns=90)
    arena_bytes = needed_arena_bytes(GRAPH, UNIT) * percent // 100
    for split in (True, False):
        plan = plan_finepage(Problem(GRAPH, arena_bytes, UNIT, profile, split))
        bound = lower_bound(GRAPH, arena_bytes, UNIT, may_cut=split)
        assert least_time_ns(bound, profile, arena_bytes) <= simulate(plan, profile).total_ns


def test_the_bound_counts_latencies_of_the_fewest_copies() -> None:
    graph, profile = chain(8, nbytes=6400), machine(h2d=1e9)

    def bound(latency_ns: int, arena_bytes: int = 0) -> int:
        late = dataclasses.replace(profile, transfer_latency_ns=latency_ns)
        found = lower_bound(graph, arena_bytes, UNIT, may_cut=True)
        return least_time_ns(found, late, arena_bytes)

    assert bound(0) == 8 * 6400
    # One copy of everything needs room for everything: with 800 ns, 6,400 bytes are best.
    assert bound(800) == pytest.approx(8 * 6400 + 6400 + 9 * 800, abs=2)
    assert bound(800, graph.weight_bytes + 64) == max(end_times_ns(graph, profile))


def test_tasks_wait_for_the_host() -> None:
    graph, profile = chain(3), dataclasses.replace(machine(h2d=1e9), host_op_ns=10**6)
    alone = alone_ns(graph, machine(h2d=1e9))
    assert [t // 10**6 for t in end_times_ns(graph, profile)] == [1, 2, 3]
    assert max(alone) < 10**6
