"""Weights are cut without ``split`` where no bit changes, if they have no room."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ds_finepage.checker.checker import check
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph import packed
from ds_finepage.graph.taskgraph import JOIN, TaskGraph
from ds_finepage.packing import sliced as _defines_it  # noqa: F401
from ds_finepage.planning.finepage.search import min_split_arena_bytes, plan_finepage
from ds_finepage.planning.liveness import ample_arena_bytes, min_arena_bytes
from ds_finepage.planning.pipeline import PlanSettings, graph_to_plan, needs_of
from ds_finepage.planning.policies import POLICIES
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite import exact_slices
from ds_finepage.planning.rewrite.embeddings import gather_rows
from ds_finepage.planning.rewrite.exact_slices import (
    least_sliced_bytes,
    slices_that_fit,
    smallest_slices,
)
from ds_finepage.planning.rewrite.split import divisible_weights, quantum
from tests.property.matmul_chains import matmul_chain
from tests.unit.execution.graphs import INPUT, OUTPUT, WEIGHT, Draft
from tests.unit.planning.finepage.test_packed_weights import layers, results_of
from tests.unit.planning.sketches import PAGING
from tests.unit.planning.steady import plan_steady

UNIT = 64
WIDTH = 8
OUT = 3 * packed.OUTPUT_ROWS + 100


def output_layer(*, with_bias: bool = True, num_rows: int = 2) -> TaskGraph:
    draft = Draft()
    x = draft.tensor(INPUT, 1, num_rows, WIDTH)
    weight = draft.tensor(WEIGHT, OUT, WIDTH, name="weight")
    bias = draft.tensor(WEIGHT, OUT, name="bias") if with_bias else None
    out = draft.tensor(OUTPUT, 1, num_rows, OUT)
    parts = (x, weight, bias)
    draft.task(packed.SLICED_LINEAR, *(p for p in parts if p is not None), out=(out,))
    draft.tasks[-1] = dataclasses.replace(draft.tasks[-1], args=parts)
    return draft.graph((x,), (out,))


def rows_of_slices(graph: TaskGraph, place: int = 1) -> list[int]:
    tasks = [t for t in graph.tasks if t.op in (packed.PACKED_LINEAR, packed.SLICED_LINEAR)]
    return [graph.tensors[t.args[place].tensor].shape[0] for t in tasks]


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 40])
def test_slices_of_an_output_layer_give_the_bits_of_the_whole(
    with_bias: bool, num_rows: int
) -> None:
    graph = output_layer(with_bias=with_bias, num_rows=num_rows)
    whole = plan_steady(graph, arena_bytes=ample_arena_bytes(graph, UNIT), policy="finepage")
    expected = results_of(check(whole), graph)
    cut = smallest_slices(graph)
    assert rows_of_slices(cut) == [*3 * [packed.OUTPUT_ROWS], 100]
    assert cut.tasks[-1].op == JOIN and cut.weight_bytes == graph.weight_bytes
    least = min_arena_bytes(cut, UNIT)
    assert least_sliced_bytes(graph, UNIT) == least < min_arena_bytes(graph, UNIT)
    found = plan_steady(graph, arena_bytes=least, policy="finepage")
    assert found.graph == cut
    assert all(map(torch.equal, results_of(check(found), graph), expected))


def test_split_may_cut_an_output_layer_anywhere() -> None:
    (unit,) = divisible_weights(output_layer())
    assert unit.exact_rows == packed.OUTPUT_ROWS and unit.beside == ()
    assert quantum(unit) == 64
    (numbers,) = divisible_weights(layers())
    assert numbers.exact_rows == quantum(numbers) == packed.CUT_ROWS


def test_slices_are_as_long_as_the_room_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = layers(2, num_rows=1, with_bias=False)
    whole = min_arena_bytes(graph, UNIT)
    assert slices_that_fit(graph, whole, UNIT) is graph
    finest = smallest_slices(graph)
    assert rows_of_slices(finest) == 2 * [*3 * [packed.CUT_ROWS], 100]
    assert slices_that_fit(graph, min_arena_bytes(finest, UNIT), UNIT) == finest
    arena_bytes = whole - UNIT
    for slices_in_room, steps in ((4, 1), (2, 1), (1, 3)):
        monkeypatch.setattr(exact_slices, "SLICES_IN_ROOM", slices_in_room)
        longest = max(rows_of_slices(slices_that_fit(graph, arena_bytes, UNIT)))
        assert longest == steps * packed.CUT_ROWS


def test_other_graphs_are_never_cut() -> None:
    plain = matmul_chain([64, 2048, 64], num_rows=2)
    assert divisible_weights(plain)
    assert smallest_slices(plain) is plain
    assert least_sliced_bytes(plain, UNIT) == min_arena_bytes(plain, UNIT)
    assert slices_that_fit(plain, 64, UNIT) is plain
    graph = output_layer()
    parted = dataclasses.replace(graph, parted=("weight",), num_ranks=2)
    assert smallest_slices(parted) is parted
    assert least_sliced_bytes(parted, UNIT) == min_arena_bytes(parted, UNIT)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_that_page_run_in_the_least_arena(policy: str) -> None:
    graph = layers(2, with_bias=False)
    least = min_arena_bytes(smallest_slices(graph), UNIT)
    if policy not in PAGING:
        with pytest.raises(PlanInfeasibleError):
            plan_steady(graph, arena_bytes=least, policy=policy)
        return
    settings = PlanSettings(policy=policy, split=False, alignment=UNIT, profile=None)  # type: ignore[arg-type]
    memgraph = check(plan_steady(graph, arena_bytes=least, policy=policy))
    assert memgraph.graph == graph_to_plan(graph, least, settings) == smallest_slices(graph)
    with pytest.raises(PlanInfeasibleError, match="needs"):
        plan_steady(graph, arena_bytes=least - UNIT, policy=policy)


@pytest.mark.parametrize("split", [False, True])
def test_the_least_budget_is_that_of_slices(split: bool) -> None:
    graph = layers(2, with_bias=False)
    whole, exact = min_arena_bytes(graph, UNIT), min_arena_bytes(smallest_slices(graph), UNIT)
    needs = needs_of(graph, alignment=UNIT, cuts_weights=split)
    assert needs.min_arena_bytes == exact < whole
    with pytest.raises(PlanInfeasibleError, match=rf"\({exact} bytes, cut into pieces\)"):
        needs.require_room(needs.non_arena_bytes + exact - UNIT)
    as_it_is = needs_of(graph, alignment=UNIT, cuts_weights=False, looks_up_rows=False)
    assert as_it_is.min_arena_bytes == whole


def test_with_split_slices_stay_whole_where_a_ring_of_them_has_no_room() -> None:
    graph = layers(2, with_bias=False)
    least = min_split_arena_bytes(graph, UNIT)
    exact = smallest_slices(gather_rows(graph))
    assert least == min_arena_bytes(exact, UNIT)
    memgraph = check(plan_finepage(Problem(graph, least, UNIT, split=True)))
    assert memgraph.graph == exact
    whole = plan_steady(graph, arena_bytes=ample_arena_bytes(graph, UNIT), policy="finepage")
    expected = results_of(check(whole), graph)
    assert all(map(torch.equal, results_of(memgraph, graph), expected))
    with pytest.raises(PlanInfeasibleError, match="needs"):
        plan_finepage(Problem(graph, least - UNIT, UNIT, split=True))
