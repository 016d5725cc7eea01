"""Cutting the weights of experts: each slice takes the same rows of every matrix."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from ds_finepage.checker.checker import check, violations
from ds_finepage.checker.faults import Fault
from ds_finepage.graph import codec
from ds_finepage.graph.memgraph import MemGraph, NodeKind
from ds_finepage.graph.profiles import load_profile
from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import ExpertMatrices, Ref, TaskGraph
from ds_finepage.planning.bounds import lower_bound_bytes
from ds_finepage.planning.finepage.residency import WeightClasses
from ds_finepage.planning.finepage.search import min_split_arena_bytes, plan_finepage
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.split import cut_weights, divisible_weights
from ds_finepage.planning.simulator import simulate
from tests.property.experts import layers_of_experts
from tests.property.matmul_chains import matmul_chain
from tests.property.token_interpreter import run_random_order

UNIT, WIDTH, NUM = 64, 64, 8
GRAPH = layers_of_experts(num_layers=1)
UP = next(b.id for b in GRAPH.buffers if b.name == "0.up")
MATRIX_BYTES = WIDTH * WIDTH * 4


def cut_up(*starts: int) -> TaskGraph:
    return cut_weights(GRAPH, {UP: starts})


def with_product(graph: TaskGraph, **changes: Any) -> TaskGraph:
    tasks = list(graph.tasks)
    tasks[2] = replace(tasks[2], **changes)
    return replace(graph, tasks=tuple(tasks))


def names(graph: TaskGraph) -> set[str]:
    return {graph.buffers[d.buffer].name for d in divisible_weights(graph)}


def test_the_matrices_of_experts_are_divisible() -> None:
    found = {GRAPH.buffers[d.buffer].name: d for d in divisible_weights(GRAPH)}
    assert set(found) == {"0.up", "0.down"}
    up = found["0.up"]
    assert (up.num_rows, up.row_bytes, up.num_matrices) == (WIDTH, NUM * WIDTH * 4, NUM)


def test_products_with_more_than_groups_are_not() -> None:
    rows, weight, ends = GRAPH.tasks[2].args
    same = with_product(GRAPH, args=(rows, weight), kwargs=(("offs", ends), ("bias", None)))
    assert "0.up" in names(same)
    assert names(with_product(GRAPH, args=(rows, weight, ends, None))) == names(GRAPH)
    for changes in (
        {"args": (rows, weight, ends, rows)},
        {"args": (rows,)},
        {"kwargs": (("bias", rows),)},
        {"kwargs": (("out_dtype", "x"),)},
    ):
        assert "0.up" not in names(with_product(GRAPH, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"stride": (WIDTH * WIDTH, WIDTH, 1)},
        {"stride": (1, NUM, NUM * WIDTH)},
        {"shape": (WIDTH, WIDTH), "stride": (1, WIDTH)},
        {"shape": (NUM // 2, WIDTH, WIDTH)},
    ],
    ids=["rows are not side by side", "matrices are not", "one matrix", "some of them"],
)
def test_matrices_in_other_layouts_are_not(changes: dict[str, Any]) -> None:
    tensors = list(GRAPH.tensors)
    weight = GRAPH.tasks[2].args[1].tensor
    tensors[weight] = replace(tensors[weight], **changes)
    assert "0.up" not in names(replace(GRAPH, tensors=tuple(tensors)))


def test_a_slice_holds_the_same_rows_of_every_matrix() -> None:
    cut = cut_up(0, 16, 40)
    assert cut.experts == (ExpertMatrices("0.up", NUM, MATRIX_BYTES),)
    slices = [b for b in cut.buffers if b.name == "0.up"]
    assert [(s.offset, s.nbytes) for s in slices] == [
        (first * NUM * WIDTH * 4, rows * NUM * WIDTH * 4)
        for first, rows in ((0, 16), (16, 24), (40, 24))
    ]
    assert [cut.num_pieces(s) for s in slices] == [NUM] * 3
    assert cut.num_pieces(GRAPH.buffers[UP]) == 1
    assert all(cut.num_pieces(b) == 1 for b in cut.buffers if b.name != "0.up")
    products = [t for t in cut.tasks if set(t.reads) & {s.id for s in slices}]
    views = [cut.tensors[t.args[1].tensor] for t in products]
    assert [(v.shape, v.stride) for v in views] == [
        ((NUM, WIDTH, rows), (WIDTH * rows, 1, WIDTH)) for rows in (16, 24, 24)
    ]
    outs = [cut.tensors[t.results[0]] for t in products if t.results[0] is not None]
    assert [(o.shape, o.offset) for o in outs] == [((2, 16), 0), ((2, 24), 16), ((2, 24), 40)]
    assert cut.weight_bytes == GRAPH.weight_bytes


def test_the_ends_of_the_groups_go_with_every_slice() -> None:
    rows, weight, ends = GRAPH.tasks[2].args
    named = with_product(GRAPH, args=(rows, weight), kwargs=(("offs", ends),))
    cut = cut_weights(named, {UP: [0, 32]})
    products = [t for t in cut.tasks if cut.buffers[t.reads[-1]].name == "0.up"]
    assert [t.kwargs for t in products] == [(("offs", ends),)] * 2
    assert len(routes(cut)) == len(routes(cut_up(0, 32))) == 3
    assert isinstance(ends, Ref)


def test_slices_of_routed_weights_are_routed() -> None:
    cut = cut_up(0, 16, 40)
    found = [routes(cut)[b.id] for b in cut.buffers if b.name == "0.up"]
    whole = routes(GRAPH)[UP]
    assert {(r.num_slices, r.most_used, r.source) for r in found} == {
        (whole.num_slices, whole.most_used, whole.source)
    }


def test_files_tell_experts() -> None:
    cut = cut_up(0, 16)
    text = codec.dumps(cut)
    assert codec.loads(text, TaskGraph) == cut
    assert codec.fingerprint(cut) != codec.fingerprint(replace(cut, experts=()))


@pytest.mark.parametrize(
    "changes", [{"offset": 4}, {"nbytes": 100}, {"offset": NUM * MATRIX_BYTES}], ids=str
)
def test_a_slice_of_parts_of_rows_is_refused(changes: dict[str, int]) -> None:
    plan = split_plan(GRAPH, 60)
    (part, *_) = (b for b in plan.graph.buffers if b.name == "0.up")
    buffers = list(plan.graph.buffers)
    buffers[part.id] = replace(part, **changes)
    graph = replace(plan.graph, buffers=tuple(buffers))
    found = violations(replace(plan, graph=graph))
    assert any(v.fault is Fault.TASKGRAPH and "the same rows of 8" in str(v) for v in found)


# Plans.


def split_plan(graph: TaskGraph, percent: int) -> MemGraph:
    least = min_split_arena_bytes(graph, UNIT)
    arena_bytes = max(least, graph.weight_bytes * percent // 100)
    profile = replace(
        load_profile("a100-80gb"), transfer_latency_ns=0, host_copy_ns=0, host_op_ns=0, launch_ns=0
    )
    return check(plan_finepage(Problem(graph, arena_bytes, UNIT, profile, split=True)))


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("percent", [5, 40, 80, 95])
def test_plans_of_cut_experts_are_right_in_any_order(rows: int, percent: int) -> None:
    graph = layers_of_experts(rows=rows)
    plan = split_plan(graph, percent)
    assert plan.graph.experts
    rng = random.Random(percent)
    for _ in range(5):
        run_random_order(plan, rng)


@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("percent", [40, 80, 95])
def test_a_part_of_a_layer_of_experts_stays(rows: int, percent: int) -> None:
    graph = layers_of_experts(num_layers=4, rows=rows)
    plan = split_plan(graph, percent)
    kept = {plan.graph.buffers[r.buffer].name for r in plan.entry}
    reloaded = {plan.graph.buffers[n.buffer].name for n in plan.nodes if n.kind is NodeKind.RELOAD}
    assert any(name.endswith(("up", "down")) for name in kept & reloaded)
    bound = lower_bound_bytes(graph, plan.arena_bytes, UNIT, may_cut=True)
    # A ring of whole weights would be as long as one of them.
    assert bound <= plan.reloaded_bytes <= 1.02 * bound + NUM * MATRIX_BYTES // 4


def test_every_matrix_of_a_slice_is_a_copy() -> None:
    plan = split_plan(layers_of_experts(rows=NUM), 40)
    latency_ns, profile = 1000, load_profile("a100-80gb")
    reloads = [n for n in plan.nodes if n.kind is NodeKind.RELOAD]
    slices = [n for n in reloads if plan.copies_at(n) == NUM]
    assert slices and all(plan.copies_at(n) in (1, NUM) for n in reloads)
    before, after = (
        simulate(plan, replace(profile, transfer_latency_ns=ns)).transfer_ns
        for ns in (0, latency_ns)
    )
    assert after - before == latency_ns * (len(reloads) + (NUM - 1) * len(slices))


def test_the_chosen_matrices_are_copies_each_and_adjacent_ones_of_a_whole_weight_are_not() -> None:
    def copies(rows: int, *, split: bool) -> set[int]:
        graph = layers_of_experts(rows=rows)
        arena_bytes = min_split_arena_bytes(graph, UNIT) if split else graph.weight_bytes // 2
        plan = check(plan_finepage(Problem(graph, arena_bytes, UNIT, split=split)))
        return {plan.copies_at(plan.nodes[n]) for n in plan.routed_reloads}

    assert copies(2, split=True) == {2}
    assert copies(6, split=True) == {6}
    assert copies(2, split=False) == {2}
    assert copies(6, split=False) == {3}  # six of eight are three runs at most


def test_slices_are_longer_where_each_is_several_copies() -> None:
    profile = load_profile("a100-80gb")
    found = []
    for graph in (matmul_chain([WIDTH] * 3), GRAPH):
        problem = Problem(graph, graph.weight_bytes, UNIT, profile)
        found.append(WeightClasses.of(problem, may_split=True).latency_bytes)
    assert found[1] == NUM * found[0] > 0
