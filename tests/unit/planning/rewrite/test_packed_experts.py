"""Packed experts in a plan: they are routed, cut with their scales and minima, and counted."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from ds_finepage.capture.counts import FLOP_COUNTS, moved_bytes
from ds_finepage.execution.measure import OpMeter, estimate_workspaces
from ds_finepage.execution.trial import Trial
from ds_finepage.graph.memgraph import Extent, MemGraph, Residency
from ds_finepage.graph.packed import CUT_ROWS, PACKED_GROUPED, SLICE_ROWS
from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.packing.form import WIDE_ROWS
from ds_finepage.planning.bounds import lower_bound
from ds_finepage.planning.builder import MemGraphBuilder
from ds_finepage.planning.liveness import extent_bytes
from ds_finepage.planning.rewrite.split import cut_weights, divisible_weights, packed_units
from tests.unit.execution.graphs import ACTIVATION, INPUT, OUTPUT, WEIGHT, Draft

UNIT = 64
NUM, ROWS, WIDTH, GROUP = 8, 3 * CUT_ROWS, 64, 32
PARTS = {"numbers": WIDTH // 2, "scales": 4 * WIDTH // GROUP, "minima": 4 * WIDTH // GROUP}
PACKET = PACKED_GROUPED.removesuffix(".default")


def layer(num_tokens: int = 2, num_rows: int = ROWS, *, with_dense: bool = False) -> TaskGraph:
    """Two rows or more, the ends of experts that a task has made, and packed matrices."""
    draft = Draft()
    x, given = draft.tensor(INPUT, num_tokens, WIDTH), draft.tensor(INPUT, NUM, dtype="int32")
    ends = draft.tensor(ACTIVATION, NUM, dtype="int32")
    draft.task("aten.clone.default", given, out=(ends,))
    shapes = {name: (NUM, num_rows, WIDTH // GROUP) for name in ("scales", "minima")}
    parts = (
        draft.tensor(WEIGHT, NUM, num_rows, WIDTH // 2, dtype="uint8", name="numbers"),
        *(draft.tensor(WEIGHT, *shape, name=name) for name, shape in shapes.items()),
    )
    if with_dense:
        dense = draft.tensor(WEIGHT, WIDTH, WIDTH, name="dense")
        x_of_experts = draft.tensor(ACTIVATION, num_tokens, WIDTH)
        draft.task("aten.mm.default", x, dense, out=(x_of_experts,))
    out = draft.tensor(OUTPUT, num_tokens, num_rows)
    draft.task(PACKED_GROUPED, x, *parts, ends, 4, GROUP, out=(out,))
    return draft.graph((x, given), (out,))


def test_numbers_scales_and_minima_are_routed_by_one_tensor() -> None:
    graph = layer()
    found = routes(graph)
    assert {graph.buffers[b].name for b in found} == set(PARTS)
    assert {(r.source, r.task, r.is_ends) for r in found.values()} == {(0, 1, True)}
    assert {(r.num_slices, r.most_used) for r in found.values()} == {(NUM, 2)}
    assert routes(layer(num_tokens=NUM)) == {}


def test_they_are_cut_at_the_same_rows_of_every_matrix() -> None:
    graph = layer()
    (unit,) = divisible_weights(graph)
    assert (unit.num_rows, unit.num_matrices) == (ROWS, NUM)
    assert [size for _, size in unit.parts] == [NUM * size for size in PARTS.values()]
    assert list(packed_units(graph)) == [unit.buffer]
    cut = cut_weights(graph, {unit.buffer: [0, CUT_ROWS]})
    assert {e.name: e.matrix_bytes for e in cut.experts} == {n: ROWS * s for n, s in PARTS.items()}
    slices = [b for b in cut.buffers if b.name in PARTS]
    assert [cut.num_pieces(b) for b in slices] == [NUM] * 6
    assert set(routes(cut)) == {b.id for b in slices}
    products = [t for t in cut.tasks if t.op == PACKED_GROUPED]
    for task, rows in zip(products, (CUT_ROWS, 2 * CUT_ROWS), strict=True):
        for ref, last in zip(task.args[1:4], (WIDTH // 2, 2, 2), strict=True):
            view = cut.tensors[ref.tensor]
            assert view.shape == (NUM, rows, last) and view.stride == (rows * last, last, 1)
        assert task.args[4:] == graph.tasks[1].args[4:]
    assert divisible_weights(layer(num_rows=CUT_ROWS)) == []


@pytest.mark.parametrize("at", [1, 2, 3])
def test_parts_in_other_layouts_are_not_cut(at: int) -> None:
    graph, tensors = layer(), list(layer().tensors)
    part = graph.tasks[1].args[at].tensor
    first, second, third = tensors[part].stride
    tensors[part] = dataclasses.replace(tensors[part], stride=(second, first, third))
    assert divisible_weights(dataclasses.replace(graph, tensors=tuple(tensors))) == []


@pytest.mark.parametrize(("num_tokens", "used"), [(2, 2), (20, NUM)])
def test_the_experts_that_have_rows_are_counted(num_tokens: int, used: int) -> None:
    x, ends = torch.empty(num_tokens, WIDTH), torch.empty(NUM, dtype=torch.int32)
    numbers = torch.empty(NUM, ROWS, WIDTH // 2, dtype=torch.uint8)
    scales = torch.empty(NUM, ROWS, WIDTH // GROUP)
    made = torch.empty(num_tokens, ROWS)
    moved = moved_bytes(PACKET, [x, numbers, scales, scales.clone(), ends], [made])
    packed = used * ROWS * sum(PARTS.values())
    assert moved == x.nbytes + ends.nbytes + made.nbytes + packed + 4 * used * ROWS * WIDTH * 4
    assert FLOP_COUNTS[PACKET](x, numbers, scales) == 2 * num_tokens * WIDTH * ROWS


@pytest.mark.usefixtures("unpacks")
def test_a_slice_of_one_matrix_is_the_workspace() -> None:
    graph = layer()
    known, halves = SLICE_ROWS * (WIDTH * 4 + WIDTH // 2), WIDTH // 2
    assert estimate_workspaces(graph, on_accelerator=False).tasks[1].workspace_bytes == known
    measured = OpMeter(torch.device("cpu")).with_costs(graph).tasks[1]
    few = (SLICE_ROWS - WIDE_ROWS) * halves  # a CPU takes the halves of a few rows at a time
    assert 0 <= measured.workspace_bytes - (known - few) < 16 and measured.time_ns


@pytest.mark.parametrize(("num_tokens", "used"), [(2, 2), (4, 4), (20, NUM)])
def test_a_trial_spreads_its_rows_over_experts(num_tokens: int, used: int) -> None:
    graph = layer(num_tokens)
    trial = Trial(graph, graph.tasks[1], torch.device("cpu"))
    wanted = trial.alone()
    bound = trial.bind(into_place=True)
    bound.call(*bound.args, **bound.kwargs)
    assert trial.fault(wanted) is None
    ends = bound.args[4].tolist()
    assert ends[-1] == num_tokens
    counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    assert sum(count > 0 for count in counts) == used and max(counts) - min(counts) <= 1


def brought_in_twice(graph: TaskGraph, before: str, twice: str) -> MemGraph:
    """Bring a weight in where another was that is used first and is no larger, and then again.

    If both are one, find it resident and bring it in once more behind its use.
    """
    extents, end = {}, 0
    for buffer in graph.buffers:
        extents[buffer.id] = Extent(end, extent_bytes(buffer.nbytes, UNIT))
        end += extents[buffer.id].nbytes if buffer.kind.is_paged else 0
    builder = MemGraphBuilder(graph, "by hand", end, UNIT)
    ids = {b.name: b.id for b in graph.buffers}
    first, second = ids[before], ids[twice]
    extents[first] = Extent(extents[second].offset, extents[first].nbytes)
    builder.begin((Residency(first, extents[first]),) if first == second else ())
    for task in graph.tasks:
        for buffer in graph.paged(task):
            if builder.states[buffer].extent is None:
                builder.alloc(buffer, extents[buffer], [])
                if buffer in task.reads:
                    builder.reload(buffer)
        builder.compute(task)
        for gone in dict.fromkeys((first, second)) if first in task.reads else ():
            builder.alloc(second, extents[second], [builder.drop(gone)])
            builder.reload(second)
    for buffer, state in enumerate(builder.states):
        if state.extent is not None:
            builder.drop(buffer)
    return builder.finish()


def test_a_slice_of_a_product_runs_while_the_next_is_reloaded() -> None:
    """So the bound of time does not add the product to the reloads behind the router."""
    graph = layer()
    tasks_ns, used_bytes = [0, 10**9], graph.weight_bytes * 2 // NUM
    whole, cut = (
        dataclasses.replace(lower_bound(graph, 1 << 30, UNIT, may_cut=may_cut), kept_bytes=0)
        for may_cut in (False, True)
    )
    # The reloads behind take as long as the product, and those ahead four times as long.
    assert whole.time_ns(tasks_ns, used_bytes) == pytest.approx(1.75e9)
    assert cut.time_ns(tasks_ns, used_bytes) == pytest.approx(1e9)
