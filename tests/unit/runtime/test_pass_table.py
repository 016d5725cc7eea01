"""Which passes are remembered, and which one makes way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from ds_finepage.errors import CaptureError, PlanInfeasibleError
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.runtime import pass_table as captures
from ds_finepage.runtime.pass_table import Captures, Pass
from ds_finepage.runtime.stats import PassStats, Stats
from tests.unit.planning.sketches import chain


class KnownCosts:
    """Ops that have been measured already."""

    library_bytes = 0

    def knows_all(self, graph: TaskGraph, *, room_bytes: int | None = None) -> bool:
        return True

    def with_costs(self, graph: TaskGraph, *, room_bytes: int | None = None) -> TaskGraph:
        return graph


class OneSizeGraph:
    """A graph whose every call is captured by itself; a call's argument is its size."""

    name = "graph"

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.refused: set[int] = set()

    def key_of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(args)

    def record_lengths(self, args: Sequence[Any], **_: Any) -> None:
        return None

    def record(self, args: Sequence[Any], **_: Any) -> TaskGraph:
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


class ManySizesGraph(OneSizeGraph):
    """A graph that is recorded once for all sizes up to 100; plans are for whole tens."""

    deciding = frozenset({"s0"})

    def __init__(self) -> None:
        super().__init__()
        self.num_recorded = 0
        self.made: list[int] = []

    def fixed_key_of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return ()

    def record_lengths(self, args: Sequence[Any], **_: Any) -> Any:
        self.num_recorded += 1
        return self

    def values_of(self, args: Sequence[Any]) -> dict[str, int]:
        return {"s0": args[0]}

    def admits(self, values: dict[str, int]) -> bool:
        return values["s0"] <= 100

    def upper_end(self, values: dict[str, int]) -> dict[str, int]:
        return {"s0": -(-values["s0"] // 10) * 10}

    def at(self, values: dict[str, int]) -> TaskGraph:
        self.made.append(values["s0"])
        return chain(3, activation_bytes=1000 * values["s0"])


def test_calls_of_one_bucket_share_a_pass() -> None:
    made, stats = remembering()
    graph = ManySizesGraph()
    passes = find(made, graph, 5, 7, 10, 11, 3)
    assert passes[0] is passes[1] is passes[2] is passes[4] is not passes[3]
    assert (graph.num_recorded, graph.made, graph.captured) == (1, [10, 20], [])
    assert stats.num_captures == 1
    assert len(made.passes) == 2


def test_a_call_that_fits_only_as_it_is_is_captured_by_itself() -> None:
    made, stats = remembering(budget_bytes=90_000)
    graph = ManySizesGraph()
    assert find(made, graph, 5)[0] is not None
    found = find(made, graph, 35)[0]  # 40,000 bytes have no room beside what is always there
    assert graph.made == [10, 40]
    assert graph.captured == [35]
    assert found is not None and len(found.graph.tasks) == 35
    assert find(made, graph, 35)[0] is found
    assert stats.num_captures == 2


def test_a_size_that_a_recording_does_not_hold_for_is_recorded_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(captures, "MAX_RECORDINGS", 2)
    made, _ = remembering()
    graph = ManySizesGraph()
    find(made, graph, 5, 101)
    assert graph.num_recorded == 2
    find(made, graph, 102)
    assert graph.num_recorded == 2  # and no more than so many
    assert graph.captured == [102]


def test_a_graph_that_cannot_be_recorded_for_many_sizes_is_not_asked_again() -> None:
    made, _ = remembering()
    graph = OneSizeGraph()
    asked = []

    def refuse(args: Sequence[Any], **_: Any) -> None:
        asked.append(args)
        raise CaptureError("one size")

    graph.record_lengths = refuse  # type: ignore[method-assign]
    find(made, graph, 4, 5)
    assert asked == [[4]]
    assert graph.captured == [4, 5]


def test_a_pass_is_a_visitor_where_most_runs_followed_another() -> None:
    found = Pass(chain(1), PassStats("pass", 1, 0, 0, 0, 0))
    for num_entries, num_runs, is_visitor in ((1, 1, True), (1, 2, False), (2, 3, True)):
        found.num_entries, found.stats.num_runs = num_entries, num_runs
        assert found.is_visitor == is_visitor


def test_what_lets_a_model_stay_on_the_device_counts_all_weights_and_activations() -> None:
    made, _ = remembering()
    made.all_weights_bytes = 10_000
    (found,) = find(made, OneSizeGraph(), 4)
    assert found is not None
    around = found.stats.around_bytes
    assert found.stats.needed_budget_bytes == around + 4 * 64 + 64
    assert found.resident_bytes == around + 10_000 + 2 * 64
    assert made.most_resident_bytes == found.resident_bytes
