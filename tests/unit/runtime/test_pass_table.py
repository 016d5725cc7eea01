"""Which passes are remembered, and which one makes way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from ds_finepage.capture import recording
from ds_finepage.errors import CaptureError, PlanInfeasibleError
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.pipeline import needs_of
from ds_finepage.runtime import pass_table
from ds_finepage.runtime.pass_maker import PassMaker
from ds_finepage.runtime.pass_table import PassTable
from ds_finepage.runtime.passes import Pass
from ds_finepage.runtime.settings import RunSettings
from ds_finepage.runtime.stats import Counters
from tests.unit.planning.finepage.test_rows import attending
from tests.unit.planning.sketches import chain
from tests.unit.runtime.settings import KnownCosts, run_settings


class OneSizeGraph:
    """A graph whose every call is captured by itself; a call's argument is its size."""

    name = "graph"
    key_positions = (0,)
    fixed_positions = ()

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.refused: set[int] = set()

    sharing: tuple[Any, ...] = ()

    def sharing_of(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return self.sharing

    def record_range(self, args: Sequence[Any], **_: Any) -> None:
        return None

    def record(self, args: Sequence[Any], **_: Any) -> TaskGraph:
        (size,) = args
        self.captured.append(size)
        if size in self.refused:
            raise CaptureError(f"a size of {size}")
        return chain(size)

    def release_buffers(self, names: Sequence[str]) -> None:
        assert names == ()


@dataclass
class Remembering:
    """A table with settings, and what happened in it."""

    table: PassTable
    settings: RunSettings
    counters: Counters
    reasons: list[str]

    def candidates(self, graph: OneSizeGraph, size: int) -> Iterator[Pass | None]:
        like_dynamos: Any = graph
        return self.table.candidates(like_dynamos, (size,), self.settings)

    def find(self, graph: OneSizeGraph, *sizes: int) -> list[Pass | None]:
        return [next(self.candidates(graph, size)) for size in sizes]

    def found(self, graph: OneSizeGraph, *sizes: int) -> list[Pass]:
        return [found for found in self.find(graph, *sizes) if found is not None]


def remembering(
    budget_bytes: int = 1 << 30, *, split: bool = False, model_bytes: int = 0
) -> Remembering:
    costs: Any = KnownCosts()
    maker = PassMaker(costs, model_bytes=model_bytes, free_device=lambda: None)
    counters, reasons = Counters(), list[str]()
    table = PassTable(maker, counters, reasons.append)
    return Remembering(table, run_settings(budget_bytes, split=split), counters, reasons)


@pytest.fixture(autouse=True)
def _graphs_record_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_table, "record", lambda graph, args, **_: graph.record(args))
    monkeypatch.setattr(
        recording, "record_range", lambda graph, args, **_: graph.record_range(args)
    )


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_table, "MAX_TASKS", 18)


def test_a_pass_that_is_known_is_not_captured_again() -> None:
    made, graph = remembering(), OneSizeGraph()
    first, again = made.found(graph, 4, 4)
    assert first is again
    assert graph.captured == [4]
    assert made.counters.num_captures == 1
    assert made.table.passes == [first]


@pytest.mark.usefixtures("_few")
def test_the_pass_that_was_used_longest_ago_is_forgotten() -> None:
    made, graph = remembering(), OneSizeGraph()
    passes = made.find(graph, 4, 5, 6, 4, 7)
    assert made.counters.num_forgotten == 1
    assert made.table.passes == [passes[0], passes[2], passes[4]]
    made.find(graph, 6, 4, 7)
    assert graph.captured == [4, 5, 6, 7]
    made.find(graph, 5)
    assert graph.captured == [4, 5, 6, 7, 5]


@pytest.mark.usefixtures("_few")
def test_no_pass_alternates_with_a_forgotten_one() -> None:
    made, graph = remembering(), OneSizeGraph()
    first, second, third = made.found(graph, 4, 5, 6)
    second.alternating, third.alternating = first, second
    made.find(graph, 7)
    assert second.alternating is None
    assert third.alternating is second


@pytest.mark.usefixtures("_few")
def test_calls_without_a_plan_are_remembered_too() -> None:
    made, graph = remembering(), OneSizeGraph()
    graph.refused = {4}
    assert made.find(graph, 4, 4) == [None, None]
    assert graph.captured == [4]
    assert made.reasons == ["a size of 4"]
    made.find(graph, 5, 6, 7)
    assert len(made.table._passes) == 3
    assert made.counters.num_forgotten == 0  # it had no plan to forget


def test_after_forgetting_every_call_is_captured_again() -> None:
    made, graph = remembering(), OneSizeGraph()
    made.find(graph, 4, 5)
    made.table.forget()
    made.table.maker.forget(0)
    assert made.table.passes == []
    assert made.table.maker.most_resident_bytes == 0
    made.find(graph, 4)
    assert graph.captured == [4, 5, 4]


def test_arguments_that_lie_otherwise_in_shared_memory_are_captured_again() -> None:
    made, graph = remembering(), OneSizeGraph()
    made.find(graph, 4)
    graph.sharing = (64, 0, 16)
    made.find(graph, 4, 4)
    assert graph.captured == [4, 4]


@pytest.mark.parametrize("split", (False, True))
def test_a_pass_without_room_is_refused(split: bool) -> None:
    made = remembering(budget_bytes=70_000, split=split)
    (found,) = made.found(OneSizeGraph(), 4)
    assert found.needs.min_budget_bytes == found.needs.non_arena_bytes + 128
    least = found.needs.min_budget_bytes
    with pytest.raises(PlanInfeasibleError):
        made.table.maker.require_room(found.graph, run_settings(least - 1, split=split))
    made.table.maker.require_room(found.graph, run_settings(least, split=split))


class Growing(KnownCosts):
    """Finds, while it measures, that a library keeps bytes for good."""

    def with_costs(
        self, graph: TaskGraph, *, make_room: Callable[[], None] = lambda: None, **_: object
    ) -> TaskGraph:
        if self.library_bytes < 3 * 512:
            make_room()
            self.library_bytes += 512
        return graph


def test_bytes_that_a_library_takes_while_ops_are_measured_count_in_earlier_passes() -> None:
    made, costs = remembering(), Growing()
    freed: list[int] = []
    made.table.maker.meter = costs  # type: ignore[assignment]
    made.table.maker._free_device = lambda: freed.append(1)
    first, second, third, fourth = made.found(OneSizeGraph(), 4, 4 + 1, 6, 7)
    assert [p.needs.non_arena_bytes % 512 for p in (first, second, third, fourth)]
    alone = remembering().found(OneSizeGraph(), 4, 5, 6, 7)
    for found, without in zip((first, second, third, fourth), alone, strict=True):
        assert found.needs.non_arena_bytes == without.needs.non_arena_bytes + 3 * 512
    assert len(freed) == 3


class ManySizesGraph(OneSizeGraph):
    """A graph that is recorded once for all sizes up to 100; plans are for whole tens."""

    def __init__(self) -> None:
        super().__init__()
        self.num_recorded = 0
        self.made: list[int] = []

    def record_range(self, args: Sequence[Any], **_: Any) -> Any:
        self.num_recorded += 1
        return self

    def values_of(self, args: Sequence[Any]) -> dict[str, int]:
        return {"s0": args[0]}

    def only_deciding(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(sizes.values())

    def admits(self, values: dict[str, int]) -> bool:
        return values["s0"] <= 100

    def upper_end(self, values: dict[str, int]) -> dict[str, int]:
        return {"s0": -(-values["s0"] // 10) * 10}

    def grown(self, values: dict[str, int], more: int) -> dict[str, int]:
        return {"s0": values["s0"] + more}

    def room_to_grow(self, values: dict[str, int], has_room: Callable[[TaskGraph], bool]) -> int:
        most = self.upper_end(values)["s0"] - values["s0"]
        return max((n for n in range(most + 1) if has_room(sized(values["s0"] + n))), default=0)

    def at(self, values: dict[str, int]) -> TaskGraph:
        self.made.append(values["s0"])
        return sized(values["s0"])


def sized(size: int) -> TaskGraph:
    return chain(3, activation_bytes=1000 * size)


def test_calls_of_one_bucket_share_a_pass() -> None:
    made, graph = remembering(), ManySizesGraph()
    passes = made.find(graph, 5, 7, 10, 11, 3)
    assert passes[0] is passes[1] is passes[2] is passes[4] is not passes[3]
    assert (graph.num_recorded, graph.made, graph.captured) == (1, [10, 20], [])
    assert made.counters.num_captures == 1
    assert len(made.table._passes) == 2


def test_a_call_whose_bucket_has_no_room_is_planned_for_the_longest_call_with_room() -> None:
    made, graph = remembering(budget_bytes=sized_need(37)), ManySizesGraph()
    assert made.find(graph, 5)[0] is not None
    (found,) = made.found(graph, 33)
    assert graph.made == [10, 40, 33, 37]
    assert made.find(graph, 34, 37, 33) == [found] * 3
    assert graph.made == [10, 40, 33, 37]
    with pytest.raises(PlanInfeasibleError) as caught:
        made.find(graph, 38)
    assert caught.value.min_budget_bytes == sized_need(38)
    assert made.find(graph, 35)[0] is found
    assert (graph.captured, made.counters.num_captures) == ([], 1)


def test_a_call_runs_in_a_plan_for_up_to_twice_its_sizes() -> None:
    made, graph = remembering(), ManySizesGraph()
    twenty, fifty = made.found(graph, 15, 45)
    assert made.find(graph, 5, 25) == [twenty, fifty]
    made.settings = run_settings(1 << 29)
    assert made.find(graph, 35)[0] is not fifty  # it may have no room now
    assert graph.made == [20, 50, 40]
    assert made.find(ManySizesGraph(), 15)[0] is not twenty


def test_passes_of_one_graph_have_one_habit() -> None:
    made, graph = remembering(), ManySizesGraph()
    first, second = made.found(graph, 5, 15)
    (other,) = made.found(ManySizesGraph(), 5)
    assert first.habit is second.habit is not other.habit
    made.table.forget()
    assert made.found(graph, 5)[0].habit is not first.habit


def sized_need(size: int) -> int:
    needs = needs_of(sized(size), alignment=64, cuts_weights=False)
    return needs.min_budget_bytes


def test_smaller_sizes_follow_where_those_that_seemed_to_have_room_have_none() -> None:
    made, graph = remembering(), ManySizesGraph()
    passes = list(made.candidates(graph, 33))
    assert graph.made == [40, 33, 36, 34]
    assert len(set(map(id, passes))) == 4
    assert made.counters.num_captures == 1


def test_a_call_that_has_no_room_itself_is_refused_before_larger_ones_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, graph = remembering(budget_bytes=sized_need(30)), ManySizesGraph()
    monkeypatch.setattr(made.table.maker, "has_room", lambda *_: True)  # before it is measured
    with pytest.raises(PlanInfeasibleError) as caught:
        made.found(graph, 33)
    assert caught.value.min_budget_bytes == sized_need(33)
    assert graph.made == [40, 33]


def test_under_other_settings_the_whole_bucket_is_tried_again() -> None:
    made, graph = remembering(budget_bytes=sized_need(37)), ManySizesGraph()
    (first,) = made.found(graph, 33)
    made.settings = run_settings(1 << 30)
    (second,) = made.found(graph, 33)
    assert second is not first
    assert graph.made == [40, 33, 37, 40]


def test_a_size_outside_every_recording_is_recorded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "MAX_RECORDINGS", 2)
    made, graph = remembering(), ManySizesGraph()
    made.find(graph, 5, 101)
    assert graph.num_recorded == 2
    made.find(graph, 102)
    assert graph.num_recorded == 2  # the limit
    assert graph.captured == [102]


def test_a_graph_of_one_size_is_not_recorded_for_many_sizes_again() -> None:
    made, graph = remembering(), OneSizeGraph()
    asked = []

    def refuse(args: Sequence[Any], **_: Any) -> None:
        asked.append(args)
        raise CaptureError("one size")

    graph.record_range = refuse  # type: ignore[method-assign]
    made.find(graph, 4, 5)
    assert asked == [(4,)]
    assert graph.captured == [4, 5]


def test_a_model_with_rows_in_host_memory_is_never_resident() -> None:
    """All rows would come in with each call, also those that a plan keeps."""
    made, graph = remembering(), OneSizeGraph()
    graph.record = lambda args, **_: attending(1)  # type: ignore[method-assign]
    (found,) = made.found(graph, 4)
    assert not found.may_be_resident(0, 1 << 60)
    (other,) = made.found(OneSizeGraph(), 4)
    assert not other.may_be_resident(made.table.maker.most_resident_bytes, 1 << 60)


def test_a_resident_model_needs_room_for_all_weights_and_activations() -> None:
    made = remembering(model_bytes=10_000)
    (found,) = made.found(OneSizeGraph(), 4)
    outside = found.needs.non_arena_bytes
    assert found.needs.needed_budget_bytes == outside + 4 * 64 + 64
    assert found.resident_bytes == outside + 10_000 + 2 * 64
    assert made.table.maker.most_resident_bytes == found.resident_bytes
