"""From a sized pass to its executor: the arena, the checked plan, the executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ds_finepage import api, whatif
from ds_finepage.errors import InvalidPlanError, PlanInfeasibleError
from ds_finepage.graph.memgraph import Extent, MemGraph, NodeKind
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.finepage.search import plan_finepage
from ds_finepage.planning.policies import POLICIES
from ds_finepage.planning.problem import Problem
from ds_finepage.runtime import binder as module
from ds_finepage.runtime.binder import Binder, plan_pass
from ds_finepage.runtime.device_memory import DeviceState
from ds_finepage.runtime.pass_maker import PassMaker
from ds_finepage.runtime.pass_table import PassTable
from ds_finepage.runtime.passes import NEAR, Pass
from ds_finepage.runtime.ranks import Ranks
from ds_finepage.runtime.settings import RunSettings
from ds_finepage.runtime.stats import Counters
from tests.unit.planning.sketches import chain
from tests.unit.runtime.settings import PROFILE, UNIT, KnownCosts, run_settings, sized_pass

NBYTES = 1024
GRAPH = chain(9, nbytes=NBYTES)
ARENA = 7 * NBYTES
SHRUNK = int(6 * NBYTES * NEAR) // UNIT * UNIT  # an arena that had to become 6 * NBYTES


class NoMemory:
    """Notes which arenas are asked for; its executors admit every size but those refused."""

    can_be_resident = False
    state = DeviceState.RELEASED

    def __init__(self) -> None:
        self.residents: dict[str, Any] = {}
        self.arenas: list[int] = []

    @property
    def held_bytes(self) -> int:
        return self.arenas[-1]

    def bind(self, found: Pass, arena_bytes: int, *_: Any) -> Any:
        assert found.memgraph is not None and found.memgraph.arena_bytes <= arena_bytes
        self.arenas.append(arena_bytes)
        executor: Any = object()
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
    made, memory, counters = binder()
    large, small = sized_pass(GRAPH), sized_pass(GRAPH)
    small.add_non_arena_bytes(NBYTES)
    settings = settings_for(large, 7 * NBYTES)
    made.bind(large, settings)
    made.bind(small, settings)
    large.unbind()
    made.bind(large, settings)
    assert memory.arenas == [7 * NBYTES, SHRUNK, SHRUNK]
    smaller = sized_pass(GRAPH)
    smaller.add_non_arena_bytes(NBYTES + UNIT)
    made.bind(smaller, settings)
    assert memory.arenas[-1] == SHRUNK and counters.num_plans == 4
    made.bind(large, settings)
    assert counters.num_plans == 4  # no plan is made again for a little less
    made.reset_arena()
    large.unbind()
    made.bind(large, settings)
    assert memory.arenas[-1] == 7 * NBYTES


def test_the_arena_grows_again_when_passes_have_missed_what_that_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REBIND_NS", 0)
    made, memory, counters = binder()
    short, long = sized_pass(GRAPH), sized_pass(GRAPH)
    long.add_non_arena_bytes(NBYTES)
    settings = settings_for(short, 7 * NBYTES)
    for _ in range(2):
        memory.arenas.clear()
        short.unbind()
        for found in (short, long):
            made.bind(found, settings)
        short.unbind()  # as the arena that it was bound to is gone
        executors = [made.bind(short, settings) for _ in range(7)]
        assert memory.arenas == [7 * NBYTES, SHRUNK, SHRUNK]
        assert len(set(map(id, executors))) == 1
        made.bind(short, settings)  # a seventh of the arena was missed seven times
        assert memory.arenas[-1] == 7 * NBYTES
        assert short.memgraph is not None and short.memgraph.arena_bytes == 7 * NBYTES
        long.unbind()
        assert counters.num_plans == 3  # it has a plan for each of both
    made.bind(long, settings)
    for _ in range(5):  # where a pass that needs the small arena comes back, it stays small
        short.unbind()
        for found in (long, *[short] * 6):
            made.bind(found, settings)
        assert memory.arenas[-1] == SHRUNK
    made._ranks = Ranks()  # they have to grow together
    made.bind(long, settings)
    short.unbind()
    for _ in range(20):
        made.bind(short, settings)
    assert memory.arenas[-2:] == [SHRUNK] * 2


@pytest.mark.parametrize(("more_bytes", "rebind_ns"), [(NBYTES, None), (UNIT, 0)])
def test_the_arena_does_not_grow_for_less_than_it_costs(
    monkeypatch: pytest.MonkeyPatch, more_bytes: int, rebind_ns: int | None
) -> None:
    if rebind_ns is not None:
        monkeypatch.setattr(module, "REBIND_NS", rebind_ns)
    made, memory, _ = binder()
    short, long, other = (sized_pass(GRAPH) for _ in range(3))
    long.add_non_arena_bytes(more_bytes)
    settings = settings_for(short, 7 * NBYTES)
    for found in (long, *[short] * 200, other):
        made.bind(found, settings)
    assert memory.arenas == [7 * NBYTES - more_bytes] * 3


def test_the_arena_is_no_larger_than_the_passes_need() -> None:
    made, memory, counters = binder()
    few, many = sized_pass(chain(3, nbytes=NBYTES)), sized_pass(GRAPH)
    maker, settings = made._table.maker, run_settings(1 << 30)
    for found in (few, many):
        maker.most_arena_bytes = found.needs.needed_arena_bytes + UNIT  # as it is sized
        made.bind(found, settings)
    few.unbind()
    made.bind(few, settings)  # its plan stays good in the larger arena
    least, most = (p.needs.needed_arena_bytes + UNIT for p in (few, many))
    assert memory.arenas == [least, most, most]
    assert counters.num_plans == 2
    # A policy whose plans leave gaps gets the rest of the budget.
    made, memory, _ = binder()
    many = sized_pass(GRAPH)
    made.bind(many, settings_for(many, 1 << 30, policy="horizon"))
    assert memory.arenas == [1 << 30]


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


class RewrittenCosts(KnownCosts):
    """Measures more workspace for tasks that a plan rewrote."""

    def with_costs(self, graph: TaskGraph, **_: object) -> TaskGraph:
        tasks = tuple(replace(t, workspace_bytes=NBYTES, time_ns=7) for t in graph.tasks)
        return replace(graph, tasks=tasks)


def test_more_workspace_of_rewritten_tasks_makes_a_smaller_arena(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, memory, counters = binder(RewrittenCosts())
    found = sized_pass(GRAPH)
    settings = settings_for(found, 7 * NBYTES)

    def rewrite(*args: Any) -> Any:
        planned = plan_pass(*args)
        return replace(planned, memgraph=replace(planned.memgraph, graph=replace(GRAPH)))

    monkeypatch.setattr(module, "plan_pass", rewrite)
    made.bind(found, settings)
    assert memory.arenas == [6 * NBYTES]
    assert counters.num_plans == 2
    assert found.memgraph is not None
    assert {t.time_ns for t in found.memgraph.graph.tasks} == {7}  # predictions are of these


# --- every plan is checked -------------------------------------------------------------------


def spoiled_plan(problem: Problem) -> MemGraph:
    """Let a weight come in over whatever lies at the start of the arena."""
    memgraph = plan_finepage(problem)
    at = next(n.id for n in memgraph.nodes if n.kind is NodeKind.ALLOC and n.extent.offset)
    nodes = list(memgraph.nodes)
    nodes[at] = replace(nodes[at], extent=Extent(0, nodes[at].extent.nbytes))
    return replace(memgraph, nodes=tuple(nodes))


def by_binder() -> None:
    found, counters = sized_pass(GRAPH), Counters()
    planned = plan_pass(found, ARENA, run_settings(), counters)
    found.set_plan(planned)
    assert planned.memgraph.graph is found.graph
    assert found.stats().arena_bytes == ARENA
    assert 0 < found.stats().lower_bound_bytes <= planned.memgraph.reloaded_bytes
    assert counters.num_plans == 1 and counters.plan_ns > 0


def by_hand() -> None:
    api.plan(GRAPH, arena_bytes=ARENA, alignment=UNIT, profile=PROFILE)


def by_forecast() -> None:
    captured = whatif.CapturedModel(model="chain", phase="decode", batch=1, seq=1, graph=GRAPH)
    budget = captured.needs.non_arena_bytes + ARENA
    whatif.plan_captured(captured, budget_bytes=budget, profile=PROFILE)


@pytest.mark.parametrize("make", (by_binder, by_hand, by_forecast))
def test_a_new_plan_is_checked(make: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    monkeypatch.setitem(POLICIES, "finepage", replace(POLICIES["finepage"], plan=spoiled_plan))
    with pytest.raises(InvalidPlanError, match="breaks .* rule"):
        make()


# --- plans that leave in place what another pass keeps ---------------------------------------


def alternating(arena_bytes: int = ARENA) -> tuple[Pass, MemGraph]:
    """Make a pass of the same weights with larger activations, beside one that is planned."""
    other = sized_pass(GRAPH)
    other.set_plan(plan_pass(other, arena_bytes, run_settings(), Counters()))
    found = sized_pass(chain(9, nbytes=NBYTES, activation_bytes=2 * NBYTES))
    found.follow(other, may_adapt=True)
    found.follow(other, may_adapt=True)
    assert found.alternating is other and other.memgraph is not None
    return found, other.memgraph


def planned_beside(found: Pass) -> MemGraph:
    return plan_pass(found, ARENA, run_settings(), Counters()).memgraph


@pytest.mark.parametrize("less", (0, NBYTES))
def test_a_pass_leaves_the_residents_of_an_alternating_pass_in_place(less: int) -> None:
    found, before = alternating(ARENA - less)
    alone = planned_beside(sized_pass(found.graph))
    beside = planned_beside(found)
    assert found.alternating is not None
    assert beside.entry and set(beside.entry) <= set(before.entry)
    assert not set(alone.entry) <= set(before.entry)


@pytest.mark.parametrize("is_planned", (True, False))
def test_an_alternating_pass_with_a_larger_arena_is_forgotten(is_planned: bool) -> None:
    found, _ = alternating(ARENA + NBYTES)
    assert found.alternating is not None
    if not is_planned:
        found.alternating.invalidate_plan("a test")
    assert planned_beside(found).entry
    assert found.alternating is None
