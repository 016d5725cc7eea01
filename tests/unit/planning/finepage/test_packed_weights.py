"""Packed weights are cut between two slices of their op: numbers, scales and minima together."""

from __future__ import annotations

import contextlib
import dataclasses
import random

import pytest
import torch

from ds_finepage.checker.checker import check
from ds_finepage.graph import packed
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import JOIN, BufferKind, Length, Ref, TaskGraph
from ds_finepage.packing import op
from ds_finepage.planning.bounds import lower_bound_bytes
from ds_finepage.planning.finepage.search import min_split_arena_bytes, plan_finepage
from ds_finepage.planning.finepage.stacking import residents_of
from ds_finepage.planning.finepage.streaming import streaming_plans
from ds_finepage.planning.liveness import ample_arena_bytes, min_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.split import cut_weights, divisible_weights, quantum
from tests.integration.parity import only_cut_plans
from tests.property.token_interpreter import run_random_order
from tests.unit.execution.graphs import ACTIVATION, INPUT, OUTPUT, WEIGHT, Draft
from tests.unit.execution.rig import Rig
from tests.unit.planning.finepage.test_search import machine

WIDTH, GROUP = 64, 32
ROWS = 3 * packed.CUT_ROWS + 100


def layers(
    num_layers: int = 1,
    *,
    bits: int = 4,
    with_bias: bool = True,
    num_rows: int = 2,
    num_floats: int = 0,
) -> TaskGraph:
    """Packed layers side by side, on three dimensions as transformers has them."""
    draft = Draft()
    x, outs = draft.tensor(INPUT, 1, num_rows, WIDTH), []
    for n in range(num_layers):
        numbers = draft.tensor(WEIGHT, ROWS, WIDTH * bits // 8, dtype="uint8", name=f"numbers{n}")
        scales = draft.tensor(WEIGHT, ROWS, WIDTH // GROUP, name=f"scales{n}")
        minima = draft.tensor(WEIGHT, ROWS, WIDTH // GROUP, name=f"minima{n}")
        bias = draft.tensor(WEIGHT, ROWS, name=f"bias{n}") if with_bias else None
        outs.append(draft.tensor(OUTPUT, 1, num_rows, ROWS))
        parts = (x, numbers, scales, minima, bias, bits, GROUP)
        given = tuple(p for p in parts if p is not None)
        draft.task(packed.PACKED_LINEAR, *given, out=(outs[-1],))
        draft.tasks[-1] = dataclasses.replace(draft.tasks[-1], args=parts)
    if num_floats:
        zeros = draft.tensor(ACTIVATION, num_floats)
        outs.append(draft.tensor(OUTPUT, num_floats))
        draft.task("aten.zeros.default", (num_floats,), out=(zeros,))
        draft.task("aten.neg.default", zeros, out=(outs[-1],))
    return draft.graph((x,), tuple(outs))


def weights_of(graph: TaskGraph) -> dict[str, torch.Tensor]:
    """Draw weights: numbers of a byte, and others in float32."""
    torch.manual_seed(0)
    dtypes = {t.buffer: getattr(torch, t.dtype) for t in reversed(graph.tensors)}
    return {
        b.name: torch.randint(0, 100, (b.nbytes,), dtype=dtypes[b.id])
        if dtypes[b.id].itemsize == 1
        else torch.randn(b.nbytes // 4)
        for b in graph.buffers
        if b.kind is WEIGHT
    }


def results_of(memgraph: MemGraph, whole: TaskGraph) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(whole.tensors[whole.inputs[0].tensor].shape)
    rig = Rig(memgraph, weights_of(whole), poison=True)
    with contextlib.closing(rig.lanes):
        return [out.clone() for out in rig(x)]


def planned(graph: TaskGraph, arena_bytes: int, **more: object) -> MemGraph:
    problem = Problem(graph, arena_bytes, 64, split=True)
    with only_cut_plans():
        return check(plan_finepage(dataclasses.replace(problem, **more)))  # type: ignore[arg-type]


def test_the_planner_knows_the_op() -> None:
    names = [name for name in vars(op) if name.startswith("packed_")]
    assert {str(getattr(op, name).default) for name in names} == packed.PACKED_PRODUCTS


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 70])
def test_slices_give_the_bits_of_the_whole(bits: int, with_bias: bool, num_rows: int) -> None:
    graph = layers(bits=bits, with_bias=with_bias, num_rows=num_rows)
    expected = results_of(planned(graph, ample_arena_bytes(graph, 64)), graph)
    (unit,) = divisible_weights(graph)
    rows = packed.CUT_ROWS
    for starts in ([0, rows], [0, 2 * rows], [0, rows, 2 * rows, 3 * rows]):
        cut = cut_weights(graph, {unit.buffer: starts})
        assert cut.weight_bytes == graph.weight_bytes
        assert [t.op == JOIN for t in cut.tasks] == [False] * len(starts) + [True]
        found = results_of(planned(cut, min_arena_bytes(cut, 64)), graph)
        assert all(map(torch.equal, found, expected))


def test_the_parts_of_a_weight_are_one_unit() -> None:
    graph = layers()
    (unit,) = divisible_weights(graph)
    names = [graph.buffers[b].name for b, _ in unit.parts]
    assert names == ["numbers0", "scales0", "minima0"]
    assert [n for _, n in unit.parts] == [WIDTH // 2, 4 * WIDTH // GROUP, 4 * WIDTH // GROUP]
    assert unit.row_bytes == sum(n for _, n in unit.parts)
    assert quantum(unit) == packed.CUT_ROWS
    cut = cut_weights(graph, {unit.buffer: [0, 512, 1024]})
    for index, (start, end) in enumerate(((0, 512), (512, 1024), (1024, ROWS))):
        parts = [cut.buffers[cut.tensors[a.tensor].buffer] for a in cut.tasks[index].args[1:4]]
        assert [p.name for p in parts] == names
        assert [p.offset for p in parts] == [start * n for _, n in unit.parts]
        assert [p.nbytes for p in parts] == [(end - start) * n for _, n in unit.parts]


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_a_plan_reads_the_right_tokens(seed: int) -> None:
    rng = random.Random(seed)
    graph = layers(rng.randint(1, 4), bits=rng.choice([4, 8]), with_bias=rng.random() < 0.5)
    least, ample = min_split_arena_bytes(graph, 64), ample_arena_bytes(graph, 64)
    slow = dataclasses.replace(machine(h2d=1e9), transfer_latency_ns=20_000)  # few large slices
    for arena_bytes in (least, rng.randint(least, ample), ample):
        found = planned(graph, arena_bytes, profile=rng.choice([None, slow]))
        assert found.peak_bytes <= arena_bytes and found.entry == found.exit
        run_random_order(found, rng)
        for task in found.graph.tasks:
            if task.op == packed.PACKED_LINEAR:
                begins = [
                    found.graph.buffers[found.graph.tensors[a.tensor].buffer].offset
                    for a in task.args[1:2]
                ]
                first_row = begins[0] * 8 // (WIDTH * task.args[5])
                assert first_row % packed.CUT_ROWS == 0


def test_bytes_are_close_to_the_bound_of_the_packed_ones() -> None:
    graph = layers(20)
    arena_bytes = graph.weight_bytes // 2
    found = planned(graph, arena_bytes)
    bound = lower_bound_bytes(graph, arena_bytes, 64, may_cut=True)
    (unit, *_) = divisible_weights(graph)
    assert 0 <= found.reloaded_bytes - bound <= 4 * packed.CUT_ROWS * unit.row_bytes
    assert found.offloaded_bytes == 0


def test_numbers_stream_past_the_scales_that_are_kept() -> None:
    graph = layers(20, with_bias=False)
    arena_bytes = graph.weight_bytes // 2
    found = list(streaming_plans(Problem(graph, arena_bytes, 64), may_split=False))
    assert found and None not in found[1:]
    plans = [plan for plan in found if isinstance(plan, MemGraph)]
    fewest = min(plan.reloaded_bytes for plan in plans)
    assert fewest <= 1.1 * lower_bound_bytes(graph, arena_bytes, 64)
    for plan in plans:
        run_random_order(check(plan), random.Random(0))


def test_another_pass_keeps_whole_units_or_nothing_of_them() -> None:
    graph = layers(6)
    arena_bytes = graph.weight_bytes * 2 // 3
    shared = residents_of(planned(graph, arena_bytes))
    more = layers(6, num_floats=arena_bytes // 8)
    found = planned(more, arena_bytes, shared=shared)
    kept = {found.graph.buffers[r.buffer].key: r.extent for r in found.entry}
    theirs = {s.buffer.key: s.extent for s in shared}
    same = [key for key in kept if key in theirs and not key.startswith("bias")]
    units = {s.buffer.name for s in shared if not s.buffer.name.startswith("bias")}
    assert 3 <= len(same) < len(units) and not len(same) % 3
    assert all(kept[key] == theirs[key] for key in same)


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1},
        {"stride": (WIDTH, 1)},
        {"shape": (ROWS - 1, WIDTH // 2)},
        {"shape": (Length(ROWS, "n"), WIDTH // 2)},
        {"dtype": "int64"},
    ],
    ids=str,
)
def test_numbers_that_do_not_fill_their_buffer_stay_whole(change: dict[str, object]) -> None:
    graph = layers()
    assert divisible_weights(graph)
    numbers = graph.tasks[0].args[1].tensor
    tensors = list(graph.tensors)
    tensors[numbers] = dataclasses.replace(tensors[numbers], **change)  # type: ignore[arg-type]
    assert divisible_weights(dataclasses.replace(graph, tensors=tuple(tensors))) == []


def test_scales_that_another_task_uses_stay_whole_with_their_numbers() -> None:
    graph = layers(2)
    first, second = graph.tasks
    args = (*second.args[:2], first.args[2], *second.args[3:])
    reads = tuple(sorted({graph.tensors[a.tensor].buffer for a in args if isinstance(a, Ref)}))
    second = dataclasses.replace(second, args=args, reads=reads)
    assert divisible_weights(dataclasses.replace(graph, tasks=(first, second))) == []


def test_a_weight_of_one_slice_stays_whole() -> None:
    graph = layers()
    small = [
        dataclasses.replace(t, shape=(packed.CUT_ROWS, *t.shape[1:]))
        if graph.buffers[t.buffer].kind is BufferKind.WEIGHT
        else t
        for t in graph.tensors
    ]
    assert divisible_weights(dataclasses.replace(graph, tensors=tuple(small))) == []
