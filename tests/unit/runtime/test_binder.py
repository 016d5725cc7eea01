"""From a sized pass to its executor: the arena, the plan, and the workspace of rewritten tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.runtime.binder import Binder
from ds_finepage.runtime.device_memory import DeviceState
from ds_finepage.runtime.pass_maker import PassMaker
from ds_finepage.runtime.pass_table import PassTable
from ds_finepage.runtime.passes import Pass
from ds_finepage.runtime.settings import RunSettings
from ds_finepage.runtime.stats import Counters
from tests.unit.planning.sketches import chain
from tests.unit.runtime.settings import KnownCosts, run_settings, sized_pass

NBYTES = 1024
GRAPH = chain(9, nbytes=NBYTES)


class NoMemory:
    """Notes which arenas are asked for; its executors admit every size but those refused."""

    can_be_resident = False
    state = DeviceState.RELEASED

    def __init__(self) -> None:
        self.residents: dict[str, Any] = {}
        self.arenas: list[int] = []
        self.admits = True

    def bind(self, found: Pass, in_place: frozenset[int], hooks: Sequence[Any]) -> Any:
        assert found.memgraph is not None
        self.arenas.append(found.memgraph.arena_bytes)
        executor: Any = SimpleNamespace(set_sizes=lambda args: self.admits)
        found.bind(executor)
        return executor


def binder(costs: KnownCosts | None = None) -> tuple[Binder, NoMemory, Counters]:
    meter: Any = costs or KnownCosts()
    counters, memory = Counters(), NoMemory()
    maker = PassMaker(meter, model_bytes=0, free_device=lambda: None)
    like_memory: Any = memory
    table = PassTable(maker, counters, lambda reason: None)
    return Binder(table, like_memory, counters, []), memory, counters


def settings_for(found: Pass, arena_bytes: int, **changes: Any) -> RunSettings:
    return run_settings(found.needs.non_arena_bytes + arena_bytes, **changes)


def test_a_pass_gets_the_rest_of_the_budget() -> None:
    made, memory, counters = binder()
    found = sized_pass(GRAPH)
    made.bind(found, settings_for(found, 7 * NBYTES + 63))
    assert memory.arenas == [7 * NBYTES]
    assert found.executor is made.bind(found, settings_for(found, 7 * NBYTES))
    assert counters.num_plans == 1


def test_passes_share_the_smallest_arena() -> None:
    made, memory, _ = binder()
    large, small = sized_pass(GRAPH), sized_pass(GRAPH)
    small.add_non_arena_bytes(NBYTES)
    settings = settings_for(large, 7 * NBYTES)
    made.bind(large, settings)
    made.bind(small, settings)
    large.unbind()
    made.bind(large, settings)
    assert memory.arenas == [7 * NBYTES, 6 * NBYTES, 6 * NBYTES]
    made.reset_arena()
    large.unbind()
    made.bind(large, settings)
    assert memory.arenas[-1] == 7 * NBYTES


def test_a_pass_that_the_shared_arena_is_too_small_for_gets_its_own() -> None:
    made, memory, _ = binder()
    few, wide = sized_pass(chain(9, nbytes=64)), sized_pass(GRAPH)
    few.add_non_arena_bytes(6 * NBYTES)
    settings = settings_for(wide, 7 * NBYTES)
    made.bind(few, settings)
    made.bind(wide, settings)
    assert memory.arenas[0] < wide.needs.min_arena_bytes
    assert memory.arenas[1] == 7 * NBYTES


def test_a_pass_without_room_takes_nothing_from_the_others() -> None:
    made, memory, _ = binder()
    found, wide = sized_pass(GRAPH), sized_pass(chain(3, nbytes=NBYTES))
    wide.add_non_arena_bytes(6 * NBYTES)
    settings = settings_for(found, 7 * NBYTES)
    with pytest.raises(PlanInfeasibleError, match="which makes min_budget_bytes"):
        made.bind(wide, settings)
    made.bind(found, settings)
    assert memory.arenas == [7 * NBYTES]


def test_a_plan_that_is_too_small_for_a_call_does_not_run_it() -> None:
    made, memory, _ = binder()
    found = sized_pass(GRAPH)
    with pytest.raises(PlanInfeasibleError):
        made.bind_for(found, (), settings_for(found, 0))
    assert made.bind_for(found, (), settings_for(found, 7 * NBYTES)) is not None
    memory.admits = False
    assert made.bind_for(found, (), settings_for(found, 7 * NBYTES)) is None


class RewrittenCosts(KnownCosts):
    """Measures more workspace for tasks that a plan rewrote."""

    def with_costs(self, graph: TaskGraph, *, room_bytes: int | None = None) -> TaskGraph:
        tasks = tuple(replace(t, workspace_bytes=NBYTES, time_ns=7) for t in graph.tasks)
        return replace(graph, tasks=tasks)


def test_more_workspace_of_rewritten_tasks_makes_a_smaller_arena(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, memory, counters = binder(RewrittenCosts())
    found = sized_pass(GRAPH)
    settings = settings_for(found, 7 * NBYTES)
    from ds_finepage.runtime import binder as module

    plan = module.plan_pass

    def rewrite(*args: Any) -> Any:
        planned = plan(*args)
        return replace(planned, memgraph=replace(planned.memgraph, graph=replace(GRAPH)))

    monkeypatch.setattr(module, "plan_pass", rewrite)
    made.bind(found, settings)
    assert memory.arenas == [6 * NBYTES]
    assert counters.num_plans == 2
    assert found.memgraph is not None
    assert {t.time_ns for t in found.memgraph.graph.tasks} == {7}  # predictions are of these
