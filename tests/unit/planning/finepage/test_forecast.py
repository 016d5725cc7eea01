"""Which passes have forecasts, and that a search writes no plan but the best."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.taskgraph import TO_HOST, ExpertMatrices, TaskGraph
from ds_finepage.planning.finepage import streaming
from ds_finepage.planning.finepage.forecast import can_forecast
from ds_finepage.planning.finepage.search import plan_finepage
from ds_finepage.planning.finepage.stacking import residents_of
from ds_finepage.planning.problem import Problem
from tests.unit.planning.finepage.test_search import machine
from tests.unit.planning.sketches import chain, sketch

UNIT = 64
FAST = machine(h2d=1e9)


def has_forecast(graph: TaskGraph, profile: HardwareProfile | None = FAST, **fields: Any) -> bool:
    problem = Problem(graph, 8 * UNIT, UNIT, profile, **fields)
    return can_forecast(problem)


def test_passes_that_need_more_of_the_simulator_have_no_forecast() -> None:
    graph = chain(8)
    assert has_forecast(graph)
    assert not has_forecast(graph, None)
    assert not has_forecast(dataclasses.replace(graph, num_ranks=2))
    experts = (ExpertMatrices("w", 2, 32),)
    assert not has_forecast(dataclasses.replace(graph, experts=experts))
    shared = residents_of(plan_finepage(Problem(graph, 6 * UNIT, UNIT)))
    assert not has_forecast(graph, shared=shared)


@pytest.mark.parametrize(("source", "expected"), [("a0", True), ("w1", False)])
def test_copies_of_activations_to_host_memory_have_forecasts(source: str, expected: bool) -> None:
    graph = sketch("w0:64 w1:64 a0:64 h:64", "w0 -> a0", f"{source} -> h", "w1 ->")
    tasks = [dataclasses.replace(t, op=TO_HOST) if t.index == 1 else t for t in graph.tasks]
    assert has_forecast(dataclasses.replace(graph, tasks=tuple(tasks))) is expected


def test_a_search_writes_the_best_plan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def noted(*args: Any, **settings: Any) -> Any:
        written.append(plan_streaming(*args, **settings))
        return written[-1]

    plan_streaming = streaming.plan_streaming
    monkeypatch.setattr(streaming, "plan_streaming", noted)
    found = plan_finepage(Problem(chain(16), 12 * UNIT, UNIT, FAST))
    assert written == [found]
