"""Which passes are remembered, and which one makes way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ds_finepage import captures
from ds_finepage.captures import Captures, Pass
from ds_finepage.counters import Stats
from ds_finepage.errors import CaptureError, PlanInfeasibleError
from ds_finepage.graph.taskgraph import TaskGraph
from tests.unit.planning.sketches import chain


class KnownCosts:
    """Ops that have been measured already."""

    library_bytes = 0

    def knows_all(self, graph: TaskGraph) -> bool:
        return True

    def with_costs(self, graph: TaskGraph) -> TaskGraph:
        return graph


class OneSizeGraph:
    """A graph whose every call is captured by itself; a call's argument is its size."""

    name = "graph"

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.refused: set[int] = set()

    def key_of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(args)

    def record_lengths(self, args: Sequence[Any]) -> None:
        return None

    def record(self, args: Sequence[Any]) -> TaskGraph:
        (size,) = args
        self.captured.append(size)
        if size in self.refused:
            raise CaptureError(f"a size of {size}")
        return chain(size)


def remembering(budget_bytes: int = 1 << 30, may_cut: bool = False) -> tuple[Captures, Stats]:
    stats = Stats(budget_bytes, 0)
    costs: Any = KnownCosts()
    made = Captures(
        stats,
        costs,
        alignment=64,
        all_weights_bytes=0,
        may_cut=lambda: may_cut,
        make_room=lambda: None,
    )
    return made, stats


def find(made: Captures, graph: OneSizeGraph, *sizes: int) -> list[Pass | None]:
    like_dynamos: Any = graph
    return [made.find(0, like_dynamos, [size]) for size in sizes]


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "MAX_PASSES", 3)


def test_a_pass_that_is_known_is_not_captured_again() -> None:
    made, stats = remembering()
    graph = OneSizeGraph()
    first, again = find(made, graph, 4, 4)
    assert first is again is not None
    assert graph.captured == [4]
    assert stats.num_captures == 1
    assert [p.name for p in stats.passes] == [first.graph.name]


@pytest.mark.usefixtures("_few")
def test_the_pass_that_was_not_used_for_longest_is_forgotten() -> None:
    made, stats = remembering()
    graph = OneSizeGraph()
    passes = find(made, graph, 4, 5, 6, 4, 7)
    assert stats.num_forgotten == 1
    assert made.planned() == [passes[2], passes[0], passes[4]]
    assert [p.num_tasks for p in stats.passes] == [4, 6, 7]
    find(made, graph, 6, 4, 7)
    assert graph.captured == [4, 5, 6, 7]
    find(made, graph, 5)
    assert graph.captured == [4, 5, 6, 7, 5]


@pytest.mark.usefixtures("_few")
def test_a_neighbour_that_is_forgotten_is_nobodys_neighbour() -> None:
    made, _ = remembering()
    graph = OneSizeGraph()
    first, second, third = find(made, graph, 4, 5, 6)
    assert first is not None and second is not None and third is not None
    second.neighbour, third.neighbour = first, second
    find(made, graph, 7)
    assert second.neighbour is None
    assert third.neighbour is second


@pytest.mark.usefixtures("_few")
def test_calls_without_a_plan_are_remembered_too() -> None:
    made, stats = remembering()
    graph = OneSizeGraph()
    graph.refused = {4}
    assert find(made, graph, 4, 4) == [None, None]
    assert graph.captured == [4]
    assert stats.unplanned_reasons == ["a size of 4"]
    find(made, graph, 5, 6, 7)
    assert len(made.passes) == 3
    assert stats.num_forgotten == 0  # it had no plan to forget


def test_after_forgetting_everything_is_captured_anew() -> None:
    made, stats = remembering()
    graph = OneSizeGraph()
    find(made, graph, 4, 5)
    made.forget()
    assert made.planned() == [] and stats.passes == []
    assert made.most_resident_bytes == 0
    find(made, graph, 4)
    assert graph.captured == [4, 5, 4]


@pytest.mark.parametrize("may_cut", (False, True))
def test_a_pass_without_room_is_refused(may_cut: bool) -> None:
    made, stats = remembering(budget_bytes=70_000, may_cut=may_cut)
    found = find(made, OneSizeGraph(), 4)[0]
    assert found is not None
    assert found.stats.min_budget_bytes == found.stats.around_bytes + 128
    stats.budget_bytes = found.stats.min_budget_bytes - 1
    with pytest.raises(PlanInfeasibleError):
        made._require_room(found.graph)
    stats.budget_bytes += 1
    made._require_room(found.graph)
