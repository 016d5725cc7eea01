"""Each heuristic can be switched off."""

from __future__ import annotations

import dataclasses

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import JOIN, TaskGraph
from ds_finepage.planning.finepage import best_plans, residency
from ds_finepage.planning.finepage.options import FinepageOptions
from ds_finepage.planning.finepage.residency import WeightClasses
from ds_finepage.planning.finepage.search import plan_finepage
from ds_finepage.planning.liveness import min_arena_bytes, needed_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.embeddings import gather_rows
from tests.property.experts import layers_of_experts
from tests.property.matmul_chains import matmul_chain
from tests.unit.planning.finepage.test_search import machine, search, tight_and_roomy
from tests.unit.planning.sketches import sketch

UNIT = 64


def planned(graph: TaskGraph, spare_bytes: int = 0, **options: bool) -> MemGraph:
    arena_bytes = min_arena_bytes(graph, UNIT) + spare_bytes
    return check(plan_finepage(Problem(graph, arena_bytes, UNIT), FinepageOptions(**options)))


def test_reloads_of_experts_are_delayed_only_if_that_is_on() -> None:
    graph = layers_of_experts()
    assert planned(graph).routed
    assert not planned(graph, delays_experts=False).routed


@pytest.mark.parametrize(("h2d", "number"), [(1e6, 1), (1e15, 2)])
def test_a_plan_whose_bytes_alone_take_longer_is_not_simulated(
    h2d: float, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tight, roomy = tight_and_roomy()
    simulated = []

    def predicted(plan: MemGraph, *_: object, **__: object) -> tuple[int, int]:
        simulated.append(plan)
        return 1000 + len(simulated), 0

    monkeypatch.setattr(best_plans, "predicted_ns", predicted)
    monkeypatch.setattr(best_plans, "wait_for_routes", lambda _: roomy)
    tried = search(machine(h2d=h2d))
    tried.offer(tight)
    assert simulated == [roomy, tight][:number]
    assert tried.best is roomy


def test_weights_up_to_the_fixed_share_are_kept() -> None:
    problem = Problem(sketch("w0:640 w1:64 a:64", "w0 -> a", "w1 a ->"), 0, UNIT)
    for share, fixed_bytes in ((0.05, 0), (0.1, 64)):
        options = FinepageOptions(fixed_share=share)
        found = WeightClasses.of(problem, may_split=False, options=options)
        assert found.fixed_bytes == fixed_bytes


def test_whole_weights_are_tried_beside_cut_ones_only_if_that_is_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residency, "LARGE_SLICES", ())  # a ring of one slice does as well
    graph = gather_rows(matmul_chain([256] * 13, num_rows=4))
    profile = dataclasses.replace(machine(h2d=1e9), transfer_latency_ns=200_000)
    arena_bytes = needed_arena_bytes(graph, UNIT) * 95 // 100
    problem = Problem(graph, arena_bytes, UNIT, profile, split=True)

    for tries_whole in (True, False):
        options = FinepageOptions(tries_whole=tries_whole)
        plan = check(plan_finepage(problem, options))
        assert any(task.op == JOIN for task in plan.graph.tasks) is not tries_whole
