"""One call of a graph: which pass runs it, and in which state of the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_finepage.errors import FinepageError, PlanInfeasibleError, RankError, StoreError
from ds_finepage.execution.device import DeviceMemoryError
from ds_finepage.execution.executor import PassCounters
from ds_finepage.execution.stores import WeightTable
from ds_finepage.graph.collectives import order_of
from ds_finepage.integrations.transformers.preflight import CacheUse
from ds_finepage.planning.budget import HOST_PROGRAM_SLACK_BYTES
from ds_finepage.runtime import plan_runner
from ds_finepage.runtime.device_memory import DeviceState
from ds_finepage.runtime.passes import Pass
from ds_finepage.runtime.plan_runner import PlanRunner
from ds_finepage.runtime.ranks import ONE_RANK, Ranks
from tests.unit.planning.sketches import chain
from tests.unit.runtime.settings import KnownCosts, run_settings, sized_pass


class Device:
    """Notes its states; a bound pass returns its graph's name, or refuses the sizes of a call."""

    can_be_resident = True
    held_bytes = 0

    def __init__(self) -> None:
        self.residents: dict[str, Any] = {}
        self.state = DeviceState.RELEASED
        self.refused: list[Pass] = []

    def to_released(self) -> None:
        self.state, self.held_bytes = DeviceState.RELEASED, 0

    def to_resident(self) -> int:
        copied = 0 if self.state is DeviceState.RESIDENT else 100
        self.state = DeviceState.RESIDENT
        return copied

    def bind(self, found: Pass, *_: Any) -> Any:
        self.state = DeviceState.PAGED
        executor: Any = SimpleNamespace(
            set_sizes=lambda args: found not in self.refused,
            run=lambda args, host_outputs, residents: [found.graph.name],
            counters=PassCounters(reloaded_bytes=7),
        )
        found.bind(executor)
        return executor


class Rig:
    """A runner whose table offers what a test puts there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device = Device()
        weights: Any = WeightTable([], torch.device("cpu"))
        like_memory: Any = self.device
        meter: Any = KnownCosts()
        self.runner = PlanRunner(run_settings(1 << 20), weights, like_memory, meter)
        self.offered: list[Pass | None] = []
        monkeypatch.setattr(self.runner.table, "candidates", lambda *_: iter(self.offered))
        monkeypatch.setattr(plan_runner, "run_resident", lambda *_: ["resident"])
        monkeypatch.setattr(plan_runner, "run_unplanned", lambda *_: ["unplanned"])

    def run(self, *offered: Pass | None) -> Any:
        self.offered[:] = offered
        graph: Any = SimpleNamespace(module=None, weights={}, host_outputs=lambda args: ())
        return self.runner.run(graph, ())


@pytest.fixture(name="rig")
def _rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def pass_named(name: str, *, resident_bytes: int = 1 << 30) -> Pass:
    found = sized_pass(replace(chain(9, nbytes=1024), name=name))
    found.resident_bytes = resident_bytes
    return found


def test_the_next_candidate_runs_where_the_first_has_no_room(rig: Rig) -> None:
    first, second = pass_named("first"), pass_named("second")
    rig.device.refused = [first]
    assert rig.run(first, second) == ["second"]
    assert rig.run(second) == ["second"]
    assert (first.stats().num_runs, second.stats().num_runs) == (0, 2)
    assert rig.runner.counters.reloaded_bytes == 14


def test_the_next_candidate_runs_where_the_first_is_refused(rig: Rig) -> None:
    first, second = pass_named("first"), pass_named("second")
    first.add_non_arena_bytes(1 << 20)
    assert rig.run(first, second) == ["second"]
    third = pass_named("third")
    third.add_non_arena_bytes(2 << 20)
    with pytest.raises(PlanInfeasibleError) as caught:
        rig.run(first, third)
    assert caught.value.min_budget_bytes == third.needs.min_budget_bytes


def test_out_of_memory_names_the_budget(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate 3 bytes")

    monkeypatch.setattr(rig.device, "bind", fail)
    with pytest.raises(
        DeviceMemoryError, match=r"1\.00 MiB \(1048576 bytes\).* are free"
    ) as caught:
        rig.run(pass_named("g"))
    assert isinstance(caught.value, FinepageError)
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert "tried to allocate 3 bytes" in str(caught.value)


def test_a_call_without_a_pass_runs_unplanned(rig: Rig) -> None:
    rig.run(pass_named("g"))
    assert rig.run(None) == ["unplanned"]
    assert rig.device.state is DeviceState.RELEASED
    assert rig.runner.counters.num_unplanned_graphs == 1


def test_a_model_without_any_plan_warns_a_few_times(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    reasons = [f"module {n} is called outside any graph" for n in range(9)]
    for reason in reasons:
        rig.runner.warn_unplanned(reason)
    assert [r.getMessage() for r in caplog.records] == [
        *(f"running without a plan: {reason}" for reason in reasons[:5]),
        "running without a plan: more; stats.unplanned_reasons has all",
    ]
    assert rig.runner.counters.unplanned_reasons == reasons


def test_a_model_that_has_room_stays_on_the_device(rig: Rig) -> None:
    small, large = pass_named("small", resident_bytes=0), pass_named("large")
    assert rig.run(small) == rig.run(small) == ["resident"]
    assert rig.device.state is DeviceState.RESIDENT
    assert small.memgraph is not None  # for the figures of the pass
    assert rig.runner.counters.num_resident_runs == 2
    assert small.stats().last_entry_reloaded_bytes == 0
    assert rig.runner.counters.reloaded_bytes == 100
    assert rig.run(large) == ["large"]
    assert rig.device.state is DeviceState.PAGED


def test_the_pass_that_ran_last_is_followed(rig: Rig) -> None:
    first, second = pass_named("first"), pass_named("second")
    for found in (first, second, second):
        rig.run(found)
    assert (first.habit.num_entries, second.habit.num_entries) == (1, 1)
    rig.runner.forget()
    rig.run(second)
    assert second.habit.num_entries == 2


# Room for a KV cache that moves.

SLACK = HOST_PROGRAM_SLACK_BYTES
BUDGET = 1 << 20


def rooms(*sizes: int) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


PAGED, RELEASED = DeviceState.PAGED, DeviceState.RELEASED
HALF = (BUDGET - SLACK) // 2


@pytest.mark.parametrize(
    ("free", "sizes", "after", "via_host", "state"),
    [
        # 2000 bytes, and one tensor of 1500 twice.
        (3500, (600, 400), [1500, 500], False, PAGED),
        (3499, (600, 400), [1500, 500], True, PAGED),
        (2000, (600, 400), [1500, 500], True, PAGED),
        (1999, (600, 400), [1500, 500], False, RELEASED),
        # Rooms that shrink need the bytes of the old ones.
        (1000, (600, 400), [300, 200], True, PAGED),
        (999, (600, 400), [300, 200], False, RELEASED),
        # Two rooms of a tensor fit, or they do not.
        (HALF - 1, (600,), [HALF], False, RELEASED),
        (HALF, (600,), [HALF + 1], True, RELEASED),
    ],
)
def test_rows_that_move_wait_in_host_memory_and_the_arena_makes_way_only_if_it_must(
    rig: Rig,
    free: int,
    sizes: tuple[int, ...],
    after: list[int],
    via_host: bool,
    state: DeviceState,
) -> None:
    rig.device.state, rig.device.held_bytes = PAGED, BUDGET - SLACK - free
    assert rig.runner._make_room(rooms(*sizes), after) is via_host
    assert rig.device.state is state


def test_a_cache_that_moves_is_refused_where_it_has_no_room(rig: Rig) -> None:
    need = BUDGET + 1
    with pytest.raises(PlanInfeasibleError, match=f"device_budget is {BUDGET} bytes") as caught:
        rig.runner._make_room(rooms(1), [need - SLACK])
    assert caught.value.min_budget_bytes == need
    others, own = torch.ones(100), torch.ones(100)
    rig.runner.live.note([others, own])
    with pytest.raises(PlanInfeasibleError) as caught:
        rig.runner._make_room([own], [BUDGET - SLACK])
    assert caught.value.min_budget_bytes == BUDGET + 400


def test_rows_that_a_caller_gets_count_beside_the_next_pass(rig: Rig) -> None:
    rows = torch.ones(100)
    rig.runner.kv_offload._note_live([rows])
    assert rig.runner.live.bytes_beside([]) == 400


# Ranks.


class Noting(Ranks):
    """Notes what this rank does, or refuses."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.error: Exception | None = None

    @contextmanager
    def together(self, args: Sequence[Any] = ()) -> Iterator[None]:
        self.seen.append("begin")
        try:
            yield
        finally:
            self.seen.append("end")

    def agree(self, collectives: str | None, args: Sequence[Any]) -> None:
        self.seen.append(collectives)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("way", ["planned", "unplanned", "resident"])
def test_ranks_agree_once_before_a_pass_runs_in_any_way(rig: Rig, way: str) -> None:
    rig.runner.ranks = ranks = Noting()
    resident_bytes = 0 if way == "resident" else 1 << 30
    found = None if way == "unplanned" else pass_named(way, resident_bytes=resident_bytes)
    order = None if found is None else order_of(found.graph)
    assert rig.run(found) == [way]
    assert ranks.seen == ["begin", order, "end"]
    ranks.error = RankError("other passes")
    with pytest.raises(RankError, match="other passes"):
        rig.run(found)
    assert found is None or found.stats().num_runs == 1


def test_a_refused_pass_ends_before_ranks_have_agreed(rig: Rig) -> None:
    rig.runner.ranks = ranks = Noting()
    found = pass_named("large")
    found.add_non_arena_bytes(2 << 20)
    with pytest.raises(PlanInfeasibleError):
        rig.run(found)
    assert ranks.seen == ["begin", "end"]


class Collecting(Noting):
    """Ranks that hold the weights together; notes what they do in common."""

    collects_weights = True

    def shared(self, what: str, make: Callable[[], Any]) -> Any:
        self.seen.append(what.partition(" of ")[0])
        return make()

    def most(self, what: str, number: int) -> int:
        self.seen.append(what)
        return number


def collecting(rig: Rig) -> Collecting:
    ranks = Collecting()
    rig.runner.ranks = rig.runner.binder._ranks = rig.runner.table.maker._ranks = ranks
    return ranks


def test_ranks_that_collect_weights_take_each_step_to_a_plan_together(rig: Rig) -> None:
    ranks, found = collecting(rig), pass_named("large")
    assert rig.run(found) == ["large"]
    assert ranks.seen[:2] == ["begin", "room for live tensors"]
    assert ranks.seen[2:4] == ["arena", "plan"] and ranks.seen[-1] == "end"
    ranks.seen.clear()
    assert rig.run(found) == ["large"]
    assert ranks.seen == ["begin", "room for live tensors", order_of(found.graph), "end"]


def test_ranks_bring_all_weights_to_the_device_together(rig: Rig) -> None:
    ranks, found = collecting(rig), pass_named("small", resident_bytes=0)
    assert rig.run(found) == rig.run(found) == ["resident"]
    assert ranks.seen.count("all weights on the device") == 1
    order = [w for w in ranks.seen if w in ("plan", "all weights on the device", "end")]
    assert order == ["plan", "all weights on the device", "end", "end"]


def test_ranks_that_collect_weights_measure_with_one_set_of_costs(rig: Rig) -> None:
    ranks = collecting(rig)
    graph = chain(3, nbytes=64)

    def of_rank_0(what: str, make: Callable[[], Any]) -> Any:
        return [(7, 64) for _ in make()]

    ranks.shared = of_rank_0  # type: ignore[method-assign]
    found = rig.runner.table.maker.measured(graph, rig.runner.settings)
    assert [(t.time_ns, t.workspace_bytes) for t in found.tasks] == [(7, 64)] * len(graph.tasks)


def test_a_generation_has_room_for_the_longest_of_all_ranks(rig: Rig) -> None:
    ranks = collecting(rig)
    ranks.most = lambda what, number: number + 5  # type: ignore[method-assign]
    for longest, wanted in ((3, 8), (None, 5)):
        with rig.runner.generation(CacheUse(longest)):
            assert rig.runner.kv_offload.use.longest == wanted
    rig.runner.ranks = ONE_RANK
    with rig.runner.generation(CacheUse(3)):
        assert rig.runner.kv_offload.use.longest == 3


def test_a_graph_without_a_plan_needs_whole_weights(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(what: str) -> None:
        raise StoreError(what)

    monkeypatch.setattr(rig.runner._weights, "require_whole", refuse)
    with pytest.raises(StoreError, match="a graph"):
        rig.run(None)
