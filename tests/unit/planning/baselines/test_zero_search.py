"""Policy zero-persistence: the settings of ZeRO-Inference that suit an arena best."""

from __future__ import annotations

import dataclasses

import pytest

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.baselines import zero_search
from ds_finepage.planning.baselines.zero import (
    EVERY_PARAMETER,
    ZeroSettings,
    authors_settings,
    element_counts,
    plan_zero_with,
    script_of,
)
from ds_finepage.planning.baselines.zero_search import MAX_SIMULATIONS, POLICY, best_settings
from ds_finepage.planning.policies import POLICIES
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.simulator import simulate
from tests.unit.planning.baselines.layered import CARD, UNIT, layered

GRAPH = layered(6, weights_a_layer=3, task_ns=50)


def problem_of(units: int, graph: TaskGraph = GRAPH, *, has_profile: bool = True) -> Problem:
    return Problem(graph, units * UNIT, UNIT, CARD if has_profile else None)


def nanoseconds(memgraph: MemGraph) -> int:
    return simulate(memgraph, CARD).total_ns


def one_knob(problem: Problem) -> MemGraph:
    """Keep as many parameters as fit, under the settings of DeepSpeed's authors."""
    numel = list(element_counts(problem.graph).values())
    for count in range(len(numel), -1, -1):
        settings = dataclasses.replace(
            authors_settings(problem.graph),
            param_persistence_threshold=EVERY_PARAMETER,
            model_persistence_threshold=sum(numel[:count]),
        )
        try:
            return plan_zero_with(problem, settings)
        except PlanInfeasibleError:
            continue
    raise AssertionError("not even without persistence")


@pytest.mark.parametrize("units", range(3, 26))
def test_a_search_is_never_worse_than_the_persistence_knob_alone(units: int) -> None:
    problem = problem_of(units)
    found = nanoseconds(POLICIES[POLICY].plan(problem))
    assert found <= nanoseconds(one_knob(problem))
    if units == 13:
        assert found < 0.9 * nanoseconds(one_knob(problem))  # it fetches ahead


@pytest.mark.parametrize("units", [3, 8, 20])
def test_the_settings_found_reproduce_the_plan(units: int) -> None:
    problem = problem_of(units)
    settings = best_settings([(problem, 1)])
    assert plan_zero_with(problem, settings, POLICY) == POLICIES[POLICY].plan(problem)


def test_without_a_profile_few_bytes_are_reloaded() -> None:
    problem = problem_of(12, has_profile=False)
    found = POLICIES[POLICY].plan(problem)
    assert found.reloaded_bytes <= one_knob(problem).reloaded_bytes


def test_two_passes_have_the_same_settings_and_both_fit() -> None:
    """The long pass has less room, so it decides."""
    passes = [(problem_of(16), 1), (problem_of(9), 30)]
    settings = best_settings(passes)
    for problem, _ in passes:
        plan_zero_with(problem, settings)
    assert settings.model_persistence_threshold < (
        best_settings(passes[:1]).model_persistence_threshold
    )


def test_what_stays_is_searched_for_in_the_room_of_every_pass() -> None:
    found = best_settings([(problem_of(40), 1), (problem_of(9), 30)])
    assert found.model_persistence_threshold > 0


def test_the_pass_that_runs_most_often_counts_most() -> None:
    slow = dataclasses.replace(
        GRAPH, tasks=tuple(dataclasses.replace(t, time_ns=2000) for t in GRAPH.tasks)
    )
    graphs = (GRAPH, slow)

    def total(settings: ZeroSettings, runs: tuple[int, int]) -> int:
        times = (nanoseconds(plan_zero_with(problem_of(10, g), settings)) for g in graphs)
        return sum(ns * num for ns, num in zip(times, runs, strict=True))

    def found(runs: tuple[int, int]) -> ZeroSettings:
        return best_settings([(problem_of(10, g), n) for g, n in zip(graphs, runs, strict=True)])

    for runs in ((1, 1000), (1000, 1)):
        assert total(found(runs), runs) <= total(found(runs[::-1]), runs)


def test_few_forwards_are_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = []

    def counted(graph: TaskGraph, settings: ZeroSettings, policy: str) -> object:
        simulated.append(settings)
        return script_of(graph, settings, policy)

    monkeypatch.setattr(zero_search, "script_of", counted)
    monkeypatch.setattr(zero_search, "MAX_SIMULATIONS", 9)
    few = best_settings([(problem_of(12), 1)])
    assert 0 < len(simulated) <= 9 + zero_search.FRAGMENTATION_STEPS
    assert len(set(simulated)) == len(simulated)  # each only once
    simulated.clear()
    monkeypatch.setattr(zero_search, "MAX_SIMULATIONS", MAX_SIMULATIONS)
    many = best_settings([(problem_of(12), 1)])
    assert 9 < len(simulated) <= MAX_SIMULATIONS + zero_search.FRAGMENTATION_STEPS
    assert nanoseconds(plan_zero_with(problem_of(12), many)) <= (
        nanoseconds(plan_zero_with(problem_of(12), few))
    )


def test_an_arena_that_is_too_small_whatever_the_settings_is_refused() -> None:
    with pytest.raises(PlanInfeasibleError, match="needs 192 B"):
        best_settings([(problem_of(2), 1)])
