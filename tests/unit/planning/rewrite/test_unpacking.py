"""Weights that are unpacked a slice of rows at a time: equal bits, less room, no whole copies."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from ds_finepage.checker.checker import check
from ds_finepage.graph.memgraph import MemGraph, NodeKind
from ds_finepage.graph.taskgraph import JOIN, BufferKind, Ref, Symbol, TaskGraph
from ds_finepage.graph.unpacking import unpacked_buffers
from ds_finepage.planning.bounds import lower_bound_bytes
from ds_finepage.planning.finepage.search import min_split_arena_bytes
from ds_finepage.planning.liveness import ample_arena_bytes, live_activation_bytes, min_arena_bytes
from ds_finepage.planning.rewrite.unpacking import unpack_by_rows
from tests.property.token_interpreter import run_random_order
from tests.unit.execution.graphs import ACTIVATION, INPUT, OUTPUT, WEIGHT, Draft
from tests.unit.planning.finepage.test_packed_weights import results_of
from tests.unit.planning.steady import plan_steady

ROWS, WIDTH, GROUP = 256, 128, 32
FLOAT = Symbol("dtype", "float32")


def add_int4(draft: Draft, x: Ref, number: int, *, kind: BufferKind = ACTIVATION) -> Ref:
    """Add a layer that unpacks groups of numbers of 4 bits; return its result."""
    groups = WIDTH // GROUP
    q = draft.tensor(WEIGHT, ROWS, WIDTH // 2, dtype="uint8", name=f"q{number}")
    scale = draft.tensor(WEIGHT, ROWS, groups, 1, name=f"scale{number}")
    least = draft.tensor(WEIGHT, ROWS, groups, 1, name=f"least{number}")
    low = draft.tensor(ACTIVATION, ROWS, WIDTH // 2, dtype="uint8")
    high = draft.tensor(ACTIVATION, ROWS, WIDTH // 2, dtype="uint8")
    both = draft.tensor(ACTIVATION, ROWS, WIDTH // 2, 2, dtype="uint8")
    cast, scaled, moved = (draft.tensor(ACTIVATION, ROWS, groups, GROUP) for _ in range(3))
    draft.task("aten.bitwise_and.Scalar", q, 15, out=(low,))
    draft.task("aten.__rshift__.Scalar", q, 4, out=(high,))
    draft.task("aten.stack.default", (low, high), -1, out=(both,))
    numbers = draft.view(both, (ROWS, groups, GROUP), (WIDTH, GROUP, 1))
    draft.task("aten._to_copy.default", numbers, out=(cast,), dtype=FLOAT)
    draft.task("aten.mul.Tensor", cast, scale, out=(scaled,))
    draft.task("aten.add.Tensor", scaled, least, out=(moved,))
    out = draft.tensor(kind, 2, ROWS)
    draft.task("aten.mm.default", x, draft.view(moved, (WIDTH, ROWS), (1, WIDTH)), out=(out,))
    return out


def layers(num_layers: int = 1) -> TaskGraph:
    """Layers side by side, so that all have the same operand."""
    draft = Draft()
    x = draft.tensor(INPUT, 2, WIDTH)
    outs = [add_int4(draft, x, n, kind=OUTPUT) for n in range(num_layers)]
    return draft.graph((x,), tuple(outs))


def int8(*, with_scale: tuple[int, ...] = (), transposed: bool = True) -> TaskGraph:
    """A layer that casts numbers of 8 bits, and may scale them."""
    draft = Draft()
    x = draft.tensor(INPUT, 2, WIDTH)
    q = draft.tensor(WEIGHT, ROWS, WIDTH, dtype="int8", name="q0")
    shape, stride = ((WIDTH, ROWS), (1, WIDTH)) if transposed else ((ROWS, WIDTH), (WIDTH, 1))
    cast = draft.tensor(ACTIVATION, ROWS, WIDTH)
    draft.task(
        "aten._to_copy.default",
        draft.view(q, shape, stride),
        out=(draft.view(cast, shape, stride),),
        dtype=FLOAT,
    )
    weight = cast
    if with_scale:
        scale = draft.tensor(WEIGHT, *with_scale, name="scale0")
        weight = draft.tensor(ACTIVATION, ROWS, WIDTH)
        draft.task("aten.mul.Tensor", cast, scale, out=(weight,))
    out = draft.tensor(OUTPUT, 2, ROWS)
    draft.task("aten.mm.default", x, draft.view(weight, (WIDTH, ROWS), (1, WIDTH)), out=(out,))
    return draft.graph((x,), (out,))


def assert_alike(graph: TaskGraph, cut: TaskGraph) -> None:
    """Run a pass with ample room, and the pass that was cut within its least arena."""
    expected = results_of(planned(graph, ample_arena_bytes(graph, 64)), graph)
    found = results_of(planned(cut, min_arena_bytes(cut, 64)), graph)
    assert all(map(torch.equal, found, expected))


def planned(graph: TaskGraph, arena_bytes: int, *, split: bool = False) -> MemGraph:
    found = plan_steady(graph, arena_bytes=arena_bytes, policy="finepage", split=split)
    return check(found)


@pytest.mark.parametrize(
    "graph",
    [layers(2), int8(), int8(with_scale=(ROWS, 1)), int8(with_scale=(WIDTH,), transposed=False)],
    ids=["int4", "cast", "scale a row", "scale a column"],
)
@pytest.mark.parametrize("cuts_products", [False, True])
def test_slices_give_the_bits_of_the_whole(graph: TaskGraph, cuts_products: bool) -> None:
    cut = unpack_by_rows(graph, cuts_products=cuts_products)
    products = [t for t in cut.tasks if t.op == "aten.mm.default"]
    num_whole = sum(t.op == "aten.mm.default" for t in graph.tasks)
    assert len(products) == num_whole * (8 if cuts_products else 1)
    assert sum(t.op == JOIN for t in cut.tasks) == num_whole
    assert cut.weight_bytes == graph.weight_bytes
    whole = planned(graph, ample_arena_bytes(graph, 64))
    expected = results_of(whole, graph)
    for arena_bytes in (
        min_arena_bytes(cut, 64),
        (min_arena_bytes(cut, 64) + ample_arena_bytes(cut, 64)) // 2,
        ample_arena_bytes(cut, 64),
    ):
        found = results_of(planned(cut, arena_bytes), graph)
        assert all(map(torch.equal, found, expected))


def test_one_whole_copy_is_left_and_none_if_products_are_cut() -> None:
    graph = layers()
    copy_bytes = ROWS * WIDTH * 4
    assert max(live_activation_bytes(graph, 64)) == 2 * copy_bytes
    for cuts_products, whole in ((False, 1), (True, 0)):
        cut = unpack_by_rows(graph, cuts_products=cuts_products)
        assert max(live_activation_bytes(cut, 64)) == whole * copy_bytes + copy_bytes // 4


@pytest.mark.parametrize("split", [False, True])
def test_any_order_of_a_plan_reads_the_right_tokens(split: bool) -> None:
    graph = layers(3)
    cut = unpack_by_rows(graph, cuts_products=split)
    least = min_split_arena_bytes(cut, 64) if split else min_arena_bytes(cut, 64)
    for arena_bytes in (least, 2 * least, ample_arena_bytes(cut, 64)):
        found = planned(graph, arena_bytes, split=split)
        assert found.peak_bytes <= arena_bytes
        for seed in range(3):
            run_random_order(found, random.Random(seed))


def test_packed_bytes_stream_and_stay_by_the_slice() -> None:
    graph = layers(6)
    cut = unpack_by_rows(graph, cuts_products=True)
    arena_bytes = max(live_activation_bytes(cut, 64)) + graph.weight_bytes // 2
    found = planned(graph, arena_bytes, split=True)
    bound = lower_bound_bytes(graph, arena_bytes, 64, may_cut=True)
    # Of the arena, two slices in the ring and the unpacked slices hold no weights that stay.
    unpacked = max(live_activation_bytes(cut, 64))
    slice_bytes = graph.weight_bytes // (6 * 8)
    assert bound == graph.weight_bytes - arena_bytes
    assert found.reloaded_bytes <= bound + unpacked + 4 * slice_bytes
    assert found.offloaded_bytes == 0


def test_an_unpacked_weight_is_never_copied_to_host_memory() -> None:
    graph = layers(2)
    cut = unpack_by_rows(graph, cuts_products=False)
    for share in (0, 1, 2, 4):
        arena_bytes = min_arena_bytes(cut, 64) + share * 4096
        found = planned(graph, arena_bytes)
        offloaded = {n.buffer for n in found.nodes if n.kind is NodeKind.OFFLOAD}
        touched = {b for t in found.graph.tasks for b in t.touches}
        assert not offloaded & touched


def test_a_pass_that_unpacks_nothing_or_is_cut_stays_as_it_is() -> None:
    graph = layers()
    for cuts_products in (False, True):
        cut = unpack_by_rows(graph, cuts_products=cuts_products)
        assert cut is not graph
        assert unpack_by_rows(cut, cuts_products=cuts_products) is cut
    plain = dataclasses.replace(
        graph,
        tensors=tuple(
            dataclasses.replace(t, dtype="int64") if t.dtype == "uint8" else t
            for t in graph.tensors
        ),
    )
    assert unpacked_buffers(plain) == frozenset()
    assert unpack_by_rows(plain, cuts_products=True) is plain


def test_a_scale_that_another_task_uses_stays_whole() -> None:
    draft = Draft()
    x = draft.tensor(INPUT, 2, WIDTH)
    out = add_int4(draft, x, 0, kind=OUTPUT)
    (scale,) = (b.id for b in draft.buffers if b.name == "scale0")
    (view,) = (t for t in draft.tensors if t.buffer == scale)
    other = draft.tensor(OUTPUT, *view.shape)
    draft.task("aten.neg.default", Ref(view.id), out=(other,))
    graph = draft.graph((x,), (out, other))
    cut = unpack_by_rows(graph, cuts_products=False)
    assert [b.nbytes for b in cut.buffers if b.name == "scale0"] == [graph.buffers[scale].nbytes]
    assert sum(b.name == "least0" for b in cut.buffers) == 8
    assert_alike(graph, cut)


def test_a_value_that_another_task_uses_is_unpacked_once() -> None:
    draft = Draft()
    x = draft.tensor(INPUT, 2, WIDTH)
    out = add_int4(draft, x, 0, kind=OUTPUT)
    scaled = next(t.results[0] for t in draft.tasks if t.op == "aten.mul.Tensor")
    assert scaled is not None
    other = draft.tensor(OUTPUT, *draft.tensors[scaled].shape[:2])
    draft.task("aten.amax.default", Ref(scaled), (-1,), out=(other,))
    graph = draft.graph((x,), (out, other))
    cut = unpack_by_rows(graph, cuts_products=False)
    assert sum(t.op == "aten._to_copy.default" for t in cut.tasks) == 8
    assert_alike(graph, cut)


def test_rows_that_are_put_side_by_side_are_not_cut() -> None:
    draft = Draft()
    x = draft.tensor(INPUT, 2, WIDTH)
    q = draft.tensor(WEIGHT, ROWS // 2, WIDTH, dtype="int8", name="q0")
    both = draft.tensor(ACTIVATION, ROWS, WIDTH, dtype="int8")
    cast = draft.tensor(ACTIVATION, ROWS, WIDTH)
    out = draft.tensor(OUTPUT, 2, ROWS)
    draft.task("aten.cat.default", (q, q), 0, out=(both,))
    draft.task("aten._to_copy.default", both, out=(cast,), dtype=FLOAT)
    draft.task("aten.mm.default", x, draft.view(cast, (WIDTH, ROWS), (1, WIDTH)), out=(out,))
    cut = unpack_by_rows(draft.graph((x,), (out,)), cuts_products=False)
    assert [t.op.split(".")[1] for t in cut.tasks] == ["cat", *["_to_copy"] * 8, "join", "mm"]
