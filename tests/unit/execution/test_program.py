"""Lowering: the waits that are left must be enough for every edge, and none too many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.execution.program import LANES, Program, Step, lower
from ds_finepage.graph.memgraph import Lane, MemGraph, NodeKind
from ds_finepage.graph.taskgraph import TO_HOST, TaskGraph
from ds_finepage.planning.liveness import min_arena_bytes
from tests.unit.planning.sketches import PAGING, chain, names, plan, sketch

COMPUTE, H2D, D2H, *_ = LANES
UNIT = 64


def planned(graph: TaskGraph, units: int, policy: str = "horizon", **others: object) -> MemGraph:
    return check(
        plan(graph, arena_bytes=units * UNIT, policy=policy, **others)  # type: ignore[arg-type]
    )


def steps(program: Program, memgraph: MemGraph) -> dict[str, list[str]]:
    """For each lane, its steps; waits are written behind them as ``"<compute 1"``."""
    named = names(memgraph)
    at = {(s.lane, s.position): named[s.node.id] for s in program.merged}
    return {
        lane.value: [
            " <".join([named[s.node.id], *(at[wait] for wait in s.waits)])
            for s in program.lanes[lane]
        ]
        for lane in (COMPUTE, H2D, D2H)
    }


def waits_of(program: Program) -> list[tuple[Step, Lane, int]]:
    return [(step, *wait) for step in program.merged for wait in step.waits]


# --- by hand ---------------------------------------------------------------------------------


def test_a_task_that_copies_to_host_memory_runs_in_the_lane_of_offloads() -> None:
    graph = sketch("w:64 a:64 h:64", "w -> a", "a -> h")
    graph = replace(graph, tasks=(graph.tasks[0], replace(graph.tasks[1], op=TO_HOST)))
    memgraph = planned(graph, 2)
    program = lower(memgraph)
    assert steps(program, memgraph)["d2h"] == ["compute 1 <compute 0"]
    assert program.mean_transfer_bytes == 64  # of the reload alone


# --- enough and not too many, against all edges ----------------------------------------------


def required(memgraph: MemGraph, program: Program) -> set[tuple[int, int]]:
    """List the pairs of steps that the memgraph's edges order, also through untimed nodes."""
    timed = {s.node.id for s in program.merged}
    behind: list[set[int]] = []  # for each node the steps that it comes after
    for before in memgraph.predecessors:
        behind.append({s for b in before for s in (behind[b] | ({b} & timed))})
    return {(b, n) for n in timed for b in behind[n]}


def reachable(
    program: Program, without: tuple[int, Lane, int] | None = None
) -> dict[int, set[int]]:
    """For each step the steps that are done before it, by the order of lanes and the waits."""
    at = {(s.lane, s.position): s.node.id for s in program.merged}
    done: dict[int, set[int]] = {}
    for step in program.merged:
        direct = [at[step.lane, step.position - 1]] if step.position > 1 else []
        for lane, position in step.waits:
            if (step.node.id, lane, position) != without:
                direct += [at[lane, p] for p in range(1, position + 1)]
        done[step.node.id] = set(direct).union(*(done[d] for d in direct))
    return done


GRAPHS = {
    "chain": chain(9),
    "activations": sketch(
        " ".join(f"a{i}:64" for i in range(7)),
        *(f"-> a{i}" for i in range(7)),
        *(f"a{i} ->" for i in range(7)),
    ),
    "mixed": sketch(
        "w1:64 w2:128 w3:64 a1:64 a2:128 a3:64 s:64",
        *("w1 -> a1", "a1 w2 s -> a2 s", "a1 a2 -> a3", "a3 w3 -> a3", "a2 w1 -> a2"),
        *("~ a1", "w2 s ->", "~ a1", "join a1 ->", "a1 a2 a3 w3 ->"),
    ),
}
cases = [
    pytest.param(graph, policy, spare, poison, id=f"{name}-{policy}-{spare}-{poison}")
    for name, graph in GRAPHS.items()
    for policy in PAGING
    for spare in (0, 1, 3)
    for poison in (False, True)
]
every_case = pytest.mark.parametrize(("graph", "policy", "spare", "poison"), cases)


def lowered(graph: TaskGraph, policy: str, spare: int, poison: bool) -> tuple[MemGraph, Program]:
    memgraph = planned(graph, min_arena_bytes(graph, UNIT) // UNIT + spare, policy)
    missing = frozenset(r.buffer for r in memgraph.entry[::2])
    program = lower(memgraph, missing=missing, poison=poison)
    steps_of = {kind: [s.node for s in program.merged if s.node.kind is kind] for kind in NodeKind}
    assert {node.buffer for node in steps_of[NodeKind.RESIDENT]} == missing
    drops = [node for node in memgraph.nodes if node.kind is NodeKind.DROP]
    assert steps_of[NodeKind.DROP] == (drops if poison else [])
    assert not steps_of[NodeKind.ALLOC]
    waited = {(lane, position) for _, lane, position in waits_of(program)}
    assert all(s.signals == ((s.lane, s.position) in waited) for s in program.merged)
    return memgraph, program


@every_case
def test_the_waits_are_enough_for_every_edge(
    graph: TaskGraph, policy: str, spare: int, poison: bool
) -> None:
    memgraph, program = lowered(graph, policy, spare, poison)
    order = reachable(program)
    for before, after in required(memgraph, program):
        assert before in order[after]


@every_case
def test_every_wait_is_needed(graph: TaskGraph, policy: str, spare: int, poison: bool) -> None:
    memgraph, program = lowered(graph, policy, spare, poison)
    pairs = required(memgraph, program)
    for step, lane, position in waits_of(program):
        order = reachable(program, without=(step.node.id, lane, position))
        assert any(b not in order[a] for b, a in pairs), f"{step} need not wait for {lane}"


def test_nodes_that_take_no_time_are_no_steps() -> None:
    program = lower(planned(chain(5), 3))
    assert {s.node.kind for s in program.merged} == {NodeKind.RELOAD, NodeKind.COMPUTE}
