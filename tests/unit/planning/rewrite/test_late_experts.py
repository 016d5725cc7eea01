"""Reloads of experts behind the router: what moves, what is saved, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ds_finepage.checker.checker import check, violations
from ds_finepage.checker.faults import Fault
from ds_finepage.graph.codec import dumps, loads
from ds_finepage.graph.memgraph import Edge, EdgeKind, MemGraph, Node, NodeKind, Residency
from ds_finepage.graph.routes import Route, routes
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.bounds import lower_bound_bytes
from ds_finepage.planning.finepage.search import plan_finepage
from ds_finepage.planning.finepage.small_arena import plans_without_ring
from ds_finepage.planning.liveness import ample_arena_bytes, min_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.late_experts import wait_for_routes
from tests.property.experts import layers_of_experts
from tests.property.matmul_chains import matmul_chain
from tests.property.token_interpreter import run_random_order
from tests.unit.graph.test_routes import looking_up
from tests.unit.planning.finepage.test_search import machine
from tests.unit.planning.rewrite.test_packed_experts import brought_in_twice
from tests.unit.planning.sketches import plan

UNIT = 64
GRAPH = layers_of_experts()
LEAST = min_arena_bytes(GRAPH, UNIT)


def planned(arena_bytes: int, **settings: object) -> MemGraph:
    return check(plan_finepage(Problem(GRAPH, arena_bytes=arena_bytes, alignment=UNIT, **settings)))


def order_of(memgraph: MemGraph, kind: NodeKind) -> list[int]:
    return [n.id for n in memgraph.nodes if n.kind is kind]


def test_a_pass_reloads_the_experts_that_it_uses() -> None:
    memgraph = planned(LEAST)
    experts = [n for n in memgraph.nodes if n.id in memgraph.routed_reloads]
    assert experts
    computes = {n.task: n.id for n in memgraph.nodes if n.kind is NodeKind.COMPUTE}
    for node in experts:
        route = memgraph.routed_reloads[node.id]
        assert computes[route.source] < node.id < computes[route.task]
        assert memgraph.bytes_at(node) * 4 == memgraph.graph.buffers[route.buffer].nbytes
    assert memgraph.reloaded_bytes < GRAPH.weight_bytes / 3


@pytest.mark.parametrize("percent", [0, 20, 40, 60, 80, 100])
def test_bytes_are_near_their_bound(percent: int) -> None:
    ample = ample_arena_bytes(GRAPH, UNIT)
    arena_bytes = LEAST + (ample - LEAST) * percent // 100 // UNIT * UNIT
    memgraph = planned(arena_bytes)
    bound = lower_bound_bytes(GRAPH, arena_bytes, UNIT)
    assert (
        lower_bound_bytes(GRAPH, arena_bytes, UNIT, may_cut=True)
        <= bound
        <= memgraph.reloaded_bytes
    )
    # Whole weights are kept or not, and one more has to have room while it is used.
    experts = max(b.nbytes for b in GRAPH.buffers) // 4
    assert memgraph.reloaded_bytes <= bound + 3 * experts


def test_what_is_not_of_experts_is_kept_first() -> None:
    memgraph = planned(LEAST + 3 * 64 * 64 * 4)
    kept = {memgraph.graph.buffers[r.buffer].name for r in memgraph.entry}
    assert {f"{layer}.dense" for layer in range(3)} <= kept


def test_time_decides_where_waiting_costs_more_than_it_saves() -> None:
    fast = planned(LEAST * 3, profile=machine(h2d=1e15))
    slow = planned(LEAST * 3, profile=machine(h2d=1e9))
    assert slow.routed
    assert slow.reloaded_bytes <= fast.reloaded_bytes


def test_a_pass_without_experts_stays_as_it_is() -> None:
    dense = plan_finepage(
        Problem(matmul_chain([64] * 6), arena_bytes=2 * 64 * 64 * 4, alignment=UNIT)
    )
    assert wait_for_routes(dense) is dense


def test_experts_that_stay_for_the_next_pass_are_whole() -> None:
    memgraph = plan(GRAPH, arena_bytes=LEAST, alignment=UNIT, policy="horizon")
    late = check(wait_for_routes(memgraph))
    kept = {r.buffer for r in memgraph.exit}
    assert kept
    assert kept.isdisjoint(late.routed)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("graph", [layers_of_experts(num_layers=1), looking_up()], ids=["", "ids"])
def test_experts_that_are_reloaded_twice_stay_where_they_are(graph: TaskGraph, seed: int) -> None:
    late = check(wait_for_routes(check(brought_in_twice(graph, "0.dense", "0.up"))))
    assert {graph.buffers[b].name for b in late.routed} == {"0.down"}
    run_random_order(late, random.Random(seed))


@pytest.mark.parametrize("seed", range(30))
def test_any_order_that_obeys_the_waits_is_right(seed: int) -> None:
    rng = random.Random(seed)
    graph = layers_of_experts(
        num_layers=rng.randint(1, 4),
        num_experts=rng.choice([3, 8]),
        rows=rng.randint(1, 4),
        width=rng.choice([1, 8, 64]),
    )
    least, ample = min_arena_bytes(graph, UNIT), ample_arena_bytes(graph, UNIT)
    arena_bytes = rng.choice([least, rng.randint(least, ample)])
    memgraph = check(plan_finepage(Problem(graph, arena_bytes=arena_bytes, alignment=UNIT)))
    run_random_order(memgraph, rng)
    for policy in ("horizon", "lru"):
        other = plan(graph, arena_bytes=2 * arena_bytes, alignment=UNIT, policy=policy)
        run_random_order(check(wait_for_routes(other)), rng)


def test_a_plan_is_the_same_when_it_was_written_down() -> None:
    memgraph = planned(LEAST)
    again = loads(dumps(memgraph), MemGraph)
    assert again == memgraph
    assert again.reloaded_bytes == memgraph.reloaded_bytes


# What the checker finds.


def faults(memgraph: MemGraph) -> set[Fault]:
    return {v.fault for v in violations(memgraph)}


def first_routed(memgraph: MemGraph) -> tuple[Node, Route]:
    node, route = next(iter(memgraph.routed_reloads.items()))
    return memgraph.nodes[node], route


def without_edge(memgraph: MemGraph, before: int, after: int) -> MemGraph:
    edges = tuple(e for e in memgraph.edges if (e.before, e.after) != (before, after))
    assert len(edges) == len(memgraph.edges) - 1
    return replace(memgraph, edges=edges)


def test_a_weight_that_is_used_whole_has_no_part() -> None:
    memgraph = planned(LEAST)
    dense = next(b.id for b in GRAPH.buffers if b.name == "2.dense")
    assert any(n.kind is NodeKind.RELOAD and n.buffer == dense for n in memgraph.nodes)
    wrong = replace(memgraph, routed=tuple(sorted([*memgraph.routed, dense])))
    assert faults(wrong) == {Fault.ROUTE_WRONG}


def test_a_part_needs_what_tells_it() -> None:
    memgraph = planned(LEAST)
    node, route = first_routed(memgraph)
    source = next(n.id for n in memgraph.nodes if n.task == route.source)
    assert faults(without_edge(memgraph, source, node.id)) == {Fault.NO_DATA_EDGE}


def test_a_part_is_not_known_before_the_task_that_tells_it() -> None:
    memgraph = next(plans_without_ring(Problem(GRAPH, ample_arena_bytes(GRAPH, UNIT), UNIT)))
    assert memgraph is not None
    early = next(
        n
        for n in memgraph.nodes
        if n.kind is NodeKind.RELOAD and GRAPH.buffers[n.buffer].name == "2.up"
    )
    assert faults(replace(memgraph, routed=(early.buffer,))) == {Fault.ROUTE_WRONG}


def test_what_tells_the_part_has_to_stay_until_the_reload() -> None:
    memgraph = planned(LEAST)
    node, route = first_routed(memgraph)
    tells = memgraph.graph.tensors[route.tensor].buffer
    dropped = next(n.id for n in memgraph.nodes if n.kind is NodeKind.DROP and n.buffer == tells)
    assert faults(without_edge(memgraph, node.id, dropped)) == {Fault.NO_READ_DROP_EDGE}


def test_a_part_cannot_be_kept() -> None:
    memgraph = planned(LEAST)
    node, route = first_routed(memgraph)
    assert node.extent is not None
    left = Residency(route.buffer, node.extent)
    assert Fault.ROUTE_WRONG in faults(replace(memgraph, exit=(*memgraph.exit, left)))


def reloaded_behind_its_use() -> MemGraph:
    """Find the experts of a layer resident, and bring them in once more behind their one use."""
    graph = layers_of_experts(num_layers=1)
    memgraph = brought_in_twice(graph, "0.up", "0.up")
    (up,) = (resident.buffer for resident in memgraph.entry)
    (reload,) = (n for n in memgraph.nodes if n.kind is NodeKind.RELOAD and n.buffer == up)
    route = routes(graph)[up]
    # Nothing but its place is wrong: it waits for what tells the slices, and that is still there.
    source = next(n.id for n in memgraph.nodes if n.task == route.source)
    tells = graph.tensors[route.tensor].buffer
    end = next(n.id for n in memgraph.nodes if n.kind is NodeKind.DROP and n.buffer == tells)
    added = {(source, reload.id): EdgeKind.DATA, (reload.id, end): EdgeKind.READ_DROP}
    edges = (*memgraph.edges, *(Edge(b, a, kind) for (b, a), kind in added.items()))
    return replace(memgraph, edges=tuple(sorted(edges)))


def test_a_part_behind_the_one_task_that_uses_it_is_of_no_use() -> None:
    memgraph = check(reloaded_behind_its_use())
    up = memgraph.entry[0].buffer
    assert faults(replace(memgraph, routed=(up,))) == {Fault.ROUTE_WRONG}
