"""Weights that come in slices: rows that were cut, and experts that a router chose."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch

from ds_finepage.errors import StoreError
from ds_finepage.graph.memgraph import NodeKind
from ds_finepage.graph.taskgraph import Symbol, TaskGraph
from ds_finepage.planning.liveness import min_arena_bytes
from ds_finepage.planning.rewrite.split import cut_weights, divisible_weights
from tests.unit.execution.graphs import ACTIVATION, INPUT, OUTPUT, WEIGHT, Draft
from tests.unit.execution.rig import N, Rig

NUM_EXPERTS = 16


def product() -> TaskGraph:
    """One product with the transpose of a weight, as a linear layer has it."""
    draft = Draft()
    x = draft.tensor(INPUT, 2, N)
    w = draft.tensor(WEIGHT, 3 * N, N, name="w")
    out = draft.tensor(OUTPUT, 2, 3 * N)
    draft.task("aten.mm.default", x, draft.view(w, (N, 3 * N), (1, N)), out=(out,))
    return draft.graph((x,), (out,))


@pytest.mark.parametrize("starts", ([0, 5], [0, 1, 2, 23], [0, 8, 16]), ids=str)
def test_every_slice_of_a_weight_is_its_own(starts: list[int], rig: Callable[..., Rig]) -> None:
    graph = product()
    (whole,) = divisible_weights(graph)
    cut = cut_weights(graph, {whole.buffer: starts})
    weights = {"w": torch.randn(3 * N, N)}
    for arena_bytes in (min_arena_bytes(cut, 64), 10_000):
        made = rig(cut, weights, arena_bytes=arena_bytes, poison=True)
        x = torch.randn(2, N)
        parts = weights["w"].tensor_split(starts[1:])
        expected = torch.cat([x @ part.t() for part in parts], dim=1)
        assert torch.equal(made(x)[0], expected)


GROUPS, ROWS, FEATURES = 4, 3, 5


def grouped() -> TaskGraph:
    """One product of rows in groups, as a layer of experts has it."""
    draft = Draft()
    x = draft.tensor(INPUT, ROWS, N)
    counts = draft.tensor(INPUT, GROUPS, dtype="int32")
    ends = draft.tensor(ACTIVATION, GROUPS, dtype="int32")
    w = draft.tensor(WEIGHT, GROUPS, FEATURES, N, name="experts")
    matrices = draft.view(w, (GROUPS, N, FEATURES), (N * FEATURES, 1, N))
    out = draft.tensor(OUTPUT, ROWS, FEATURES)
    int32 = Symbol("dtype", "int32")
    draft.task("aten.cumsum.default", counts, 0, out=(ends,), dtype=int32)
    draft.task("transformers.grouped_mm_fallback.default", x, matrices, ends, out=(out,))
    return draft.graph((x, counts), (out,))


@pytest.mark.parametrize("starts", ([0, 2], [0, 1, 4]), ids=str)
@pytest.mark.parametrize("counts", ([1, 0, 2, 0], [0, 0, 0, 3], [1, 1, 0, 1]), ids=str)
def test_slices_of_experts_hold_the_same_rows_of_each(
    starts: list[int], counts: list[int], rig: Callable[..., Rig]
) -> None:
    importlib.import_module("transformers.integrations.moe")  # registers the op
    graph = grouped()
    (whole,) = divisible_weights(graph)
    cut = cut_weights(graph, {whole.buffer: starts})
    weights = {"experts": torch.randn(GROUPS, FEATURES, N)}
    x = torch.randn(ROWS, N)
    groups = torch.repeat_interleave(torch.tensor(counts))
    parts = [
        torch.stack(
            [row @ weights["experts"][g, a:b].t() for row, g in zip(x, groups, strict=True)]
        )
        for a, b in zip(starts, [*starts[1:], FEATURES], strict=True)
    ]
    for arena_bytes in (min_arena_bytes(cut, 64), 10_000):
        made = rig(cut, weights, arena_bytes=arena_bytes, poison=True)
        assert bool(made.memgraph.routed) == (arena_bytes < 10_000)
        found = made(x, torch.tensor(counts, dtype=torch.int32))[0]
        assert torch.allclose(found, torch.cat(parts, dim=1), atol=1e-6)
        counters = made.executor.counters
        reloaded = counters.reloaded_bytes - counters.entry_reloaded_bytes
        used = sum(n > 0 for n in counts)
        streamed = {n.buffer for n in made.memgraph.nodes if n.kind is NodeKind.RELOAD}
        whole_bytes = sum(b.nbytes for b in cut.buffers if b.id in streamed)
        assert reloaded == whole_bytes * used // GROUPS


def test_a_master_without_the_last_matrix_is_refused(rig: Callable[..., Rig]) -> None:
    graph = grouped()
    (whole,) = divisible_weights(graph)
    cut = cut_weights(graph, {whole.buffer: [0, 2]})
    short = {"experts": torch.randn(GROUPS - 1, FEATURES, N)}
    with pytest.raises(StoreError, match="has 480 bytes; captured were bytes up to 640"):
        rig(cut, short, arena_bytes=10_000)


def chosen() -> TaskGraph:
    """Experts that are looked up by numbers which the pass works out."""
    draft = Draft()
    scores = draft.tensor(INPUT, 2, NUM_EXPERTS)
    experts = draft.tensor(WEIGHT, NUM_EXPERTS, N, N, name="experts")
    dense = draft.tensor(WEIGHT, N, N, name="dense")
    numbers = draft.tensor(ACTIVATION, 2, dtype="int64")
    mine = draft.tensor(ACTIVATION, 2, N, N)
    out = draft.tensor(OUTPUT, 2, N, N)
    draft.task("aten.argmax.default", scores, 1, out=(numbers,))
    draft.task("aten.index.Tensor", experts, (numbers,), out=(mine,))
    draft.task("aten.mul.Tensor", mine, dense, out=(out,))
    return draft.graph((scores,), (out,))


@pytest.mark.parametrize("numbers", ([3, 11], [0, 15], [7, 7], [4, 5]), ids=str)
def test_experts_that_were_not_chosen_are_neither_copied_nor_counted(
    numbers: list[int], rig: Callable[..., Rig]
) -> None:
    graph = chosen()
    weights = {"experts": torch.randn(NUM_EXPERTS, N, N), "dense": torch.randn(N, N)}
    made = rig(graph, weights, arena_bytes=min_arena_bytes(graph, 64), poison=True)
    memgraph = made.memgraph
    (experts,) = (b for b in graph.buffers if b.name == "experts")
    assert memgraph.routed == (experts.id,)
    scores = torch.nn.functional.one_hot(torch.tensor(numbers), NUM_EXPERTS).float()
    for is_first in (True, False):
        assert torch.equal(made(scores)[0], weights["experts"][numbers] * weights["dense"])
        counters = made.executor.counters
        entry = counters.entry_reloaded_bytes
        assert bool(entry) == (is_first and bool(memgraph.entry))
        others = sum(
            n.extent is not None and n.buffer != experts.id and graph.buffers[n.buffer].nbytes
            for n in memgraph.nodes
            if n.kind.value == "reload"
        )
        used = len(set(numbers)) * N * N * 4
        assert counters.reloaded_bytes == entry + others + used
