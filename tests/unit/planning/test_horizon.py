"""The published two-horizon simulation, and its order of events."""

from __future__ import annotations

from typing import Any

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.graph.memgraph import Extent, MemGraph, NodeKind, Residency
from ds_finepage.graph.taskgraph import Task, TaskGraph
from ds_finepage.planning.horizon import HorizonPlanner, plan_horizon
from ds_finepage.planning.liveness import min_arena_bytes
from ds_finepage.planning.problem import Problem
from tests.unit.planning.sketches import chain, names, offsets, sketch

UNIT = 64


def planner(
    graph: TaskGraph, units: int, entry: tuple[Residency, ...] = (), **others: frozenset[int]
) -> HorizonPlanner:
    problem = Problem(graph, units * UNIT, UNIT, entry=entry)
    return HorizonPlanner(problem, policy="test", **others)


def resident(graph: TaskGraph, **at: int) -> tuple[Residency, ...]:
    """Say which weights are resident at which unit."""
    ids = {b.name: b for b in graph.buffers}
    return tuple(
        Residency(ids[n].id, Extent(unit * UNIT, -(-ids[n].nbytes // UNIT) * UNIT))
        for n, unit in at.items()
    )


def working_set(graph: TaskGraph, units: int, **others: Any) -> MemGraph:
    return check(planner(graph, units, **others).plan_working_set())


def vacated(memgraph: MemGraph) -> list[str]:
    return [n for n in names(memgraph) if n.startswith(("drop", "offload"))]


def test_the_allocation_horizon_runs_ahead_while_memory_is_free() -> None:
    memgraph = working_set(sketch("w1:64 w2:64 w3:64", "w1 ->", "w2 ->", "w3 ->"), 2)
    assert names(memgraph) == [
        *("alloc w1", "reload w1"),
        *("alloc w2", "reload w2"),
        "compute 0",
        "compute 1",
        *("drop w1", "alloc w3", "reload w3"),
        "compute 2",
    ]


def test_lookahead_reserves_all_of_a_task_or_nothing() -> None:
    # One unit is left for task 1, which needs two: it must not be taken for half of it.
    graph = sketch("w1:64 w2:64 a1:64 a2:64", "w1 -> a1", "a1 w2 -> a2", "a2 ->")
    order = names(working_set(graph, 3))
    assert order.index("compute 0") < order.index("alloc a2")
    assert order.index("compute 0") < order.index("alloc w2")


def test_lookahead_goes_on_when_a_task_has_freed_memory() -> None:
    graph = sketch("a1:64 a2:64 a3:64", "-> a1", "a1 ->", "-> a2", "a2 ->", "-> a3", "a3 ->")
    order = names(working_set(graph, 2))
    assert order.index("alloc a2") < order.index("compute 0")
    assert order.index("drop a1") < order.index("alloc a3") < order.index("compute 2")


def test_a_task_in_need_forces_one_buffer_after_the_other() -> None:
    graph = sketch("w1:64 w2:64 w3:64 w4:64", "w1 w2 ->", "w3 w4 ->")
    assert names(working_set(graph, 2))[4:] == [
        "compute 0",
        *("drop w1", "alloc w3", "reload w3"),
        *("drop w2", "alloc w4", "reload w4"),
        "compute 1",
    ]


def test_a_task_in_need_keeps_its_own_buffers() -> None:
    # w1 has the farthest next use of all, but task 1 needs it too.
    graph = sketch("w1:64 w2:64 w3:64", "w1 w2 ->", "w1 w3 ->", "w2 ->")
    memgraph = working_set(graph, 2)
    assert vacated(memgraph)[0] == "drop w2"


def test_the_victim_is_the_one_whose_next_use_is_farthest() -> None:
    tasks = ("w1 w2 w3 ->", "w4 ->", "w2 ->", "w1 ->", "w3 ->")
    memgraph = working_set(sketch("w1:64 w2:64 w3:64 w4:64", *tasks), 3)
    assert vacated(memgraph)[0] == "drop w3"


def test_a_weight_that_is_not_used_again_in_the_pass_is_the_first_victim() -> None:
    graph = sketch("w1:64 w2:64 w3:64", "w1 w2 ->", "w3 ->", "w1 ->")
    assert vacated(working_set(graph, 2)) == ["drop w2"]


def test_a_dead_activation_is_freed_at_once_and_a_weight_kept() -> None:
    memgraph = working_set(sketch("w:64 a:64", "w -> a", "a ->", "w ->"), 4)
    assert names(memgraph)[-4:] == ["compute 0", "compute 1", "drop a", "compute 2"]
    assert [r.buffer for r in memgraph.exit] == [0]


def test_a_result_that_nobody_reads_is_freed_at_once() -> None:
    order = names(working_set(sketch("a1:64 a2:64", "-> a1 a2", "a1 ->"), 4))
    assert order == ["alloc a1", "alloc a2", "compute 0", "drop a2", "compute 1", "drop a1"]


def test_a_streamed_weight_is_dropped_after_its_last_use() -> None:
    graph = sketch("w1:64 w2:64", "w1 w2 ->", "w1 ->")
    memgraph = working_set(graph, 2, streamed=frozenset({0, 1}))
    assert names(memgraph)[-4:] == ["compute 0", "drop w2", "compute 1", "drop w1"]
    assert memgraph.exit == ()


def test_a_resident_weight_is_not_reloaded() -> None:
    graph = sketch("w1:64 w2:64", "w1 ->", "w2 ->")
    memgraph = working_set(graph, 2, entry=resident(graph, w1=1))
    assert [n for n in names(memgraph) if n.startswith("reload")] == ["reload w2"]
    assert offsets(memgraph) == {"resident w1": 64, "alloc w2": 0}


def test_a_dirty_activation_is_offloaded_and_comes_back() -> None:
    graph = sketch("a1:64 a2:64 a3:64", "-> a1", "-> a2", "a2 -> a3", "a3 ->", "a1 ->")
    memgraph = working_set(graph, 2)
    order = names(memgraph)
    assert order.index("offload a1") < order.index("compute 2")
    assert order.index("compute 2") < order.index("reload a1") < order.index("compute 4")


def test_an_activation_that_is_overwritten_next_is_dropped() -> None:
    graph = sketch("a1:64 a2:64 a3:64", "-> a1", "-> a2", "a2 -> a3", "a3 ->", "-> a1", "a1 ->")
    memgraph = working_set(graph, 2)
    assert memgraph.offloaded_bytes == memgraph.reloaded_bytes == 0


# --- the order of events, against the published pseudo code ----------------------------------


class Traced(HorizonPlanner):
    """Writes down what the loop does."""

    def trace(self) -> list[tuple[str, int, bool]]:
        self.events: list[tuple[str, int, bool]] = []
        self.evicting = False
        self.plan_working_set()
        return self.events

    def _reserve(self, task: Task) -> bool:
        done = super()._reserve(task)
        self.events.append(("reserve", task.index, done))
        return done

    def _force_all(self, task: Task) -> None:
        self.evicting = True
        super()._force_all(task)
        self.evicting = False
        self.events.append(("force", task.index, True))

    def _evict(self, buffer: int) -> None:
        assert self.evicting, "evicted for lookahead"
        super()._evict(buffer)

    def _simulate(self, task: Task) -> bool:
        freed = super()._simulate(task)
        self.events.append(("simulate", task.index, freed))
        return freed


def traced(graph: TaskGraph, units: int) -> Traced:
    return Traced(Problem(graph, units * UNIT, UNIT), policy="traced")


GRAPHS = {
    "chain": chain(8),
    "wide": sketch(
        "w1:64 w2:128 w3:64 a1:64 a2:128 a3:64",
        *("w1 -> a1", "a1 w2 -> a2", "a1 a2 -> a3", "a3 w3 -> a3", "a2 w1 -> a2", "a2 a3 ->"),
    ),
    "activations": sketch(
        " ".join(f"a{i}:64" for i in range(6)),
        *(f"-> a{i}" for i in range(6)),
        *(f"a{i} ->" for i in range(6)),
    ),
}
every_graph = pytest.mark.parametrize("name", GRAPHS)
rooms = pytest.mark.parametrize("spare", range(4))


@every_graph
@rooms
def test_working_set_does_what_the_pseudo_code_says(name: str, spare: int) -> None:
    graph = GRAPHS[name]
    events = iter(traced(graph, min_arena_bytes(graph, UNIT) // UNIT + spare).trace())
    ahead, freed = 0, True  # memory is free in the beginning
    for now in range(len(graph.tasks)):
        if freed:
            while ahead < len(graph.tasks):
                kind, task, done = next(events)
                assert (kind, task) == ("reserve", ahead)
                if not done:
                    break
                ahead += 1
        if ahead == now:
            assert next(events) == ("force", now, True)
            ahead += 1
        kind, task, freed = next(events)
        assert (kind, task) == ("simulate", now)
    assert next(events, None) is None


def test_the_policy_is_written_into_the_memgraph() -> None:
    memgraph = plan_horizon(Problem(chain(2), 512, UNIT))
    assert memgraph.policy == "horizon"
    assert (memgraph.arena_bytes, memgraph.alignment) == (512, UNIT)


# --- repacking -------------------------------------------------------------------------------


def fragmented() -> TaskGraph:
    """Task 1 needs w1 (in the middle of the arena) and w2, which only fits beside it."""
    return sketch("w1:64 w2:128", "w1 ->", "w1 w2 ->")


def test_operands_that_fragment_the_least_arena_are_repacked() -> None:
    graph = fragmented()
    memgraph = working_set(graph, 3, entry=resident(graph, w1=1))
    assert names(memgraph)[1:] == [
        "compute 0",
        "drop w1",
        *("alloc w1", "reload w1", "alloc w2", "reload w2"),
        "compute 1",
    ]
    assert offsets(memgraph) == {"resident w1": 64, "alloc w1": 0, "alloc w2": 64}


def test_repacking_offloads_what_is_dirty() -> None:
    graph = sketch("w1:64 w2:128 a:64", "w1 -> a", "a w2 ->")
    memgraph = working_set(graph, 3, entry=resident(graph, w1=0))
    assert memgraph.offloaded_bytes == 64  # "a" lay in the middle


def test_every_extent_comes_from_the_routine_of_the_thesis(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    sim_malloc = HorizonPlanner.sim_malloc

    def watched(self: HorizonPlanner, buffer: int) -> bool:
        done = sim_malloc(self, buffer)
        asked.extend([buffer] * done)
        return done

    monkeypatch.setattr(HorizonPlanner, "sim_malloc", watched)
    found = plan_horizon(Problem(chain(6), 4 * 64))
    assert asked == [n.buffer for n in found.nodes if n.kind is NodeKind.ALLOC] != []
