"""Weights in the arena from pass to pass, and the host memory that they come from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ds_finepage.errors import StoreError
from ds_finepage.execution import executor
from ds_finepage.execution.arena import byte_view
from ds_finepage.execution.executor import OpHook, Residents
from ds_finepage.execution.program import Program, lower
from ds_finepage.graph.memgraph import Extent, MemGraph, NodeKind
from ds_finepage.graph.taskgraph import Task, TaskGraph
from ds_finepage.planning.liveness import min_arena_bytes
from ds_finepage.planning.rewrite.embeddings import gather_rows
from tests.unit.execution.graphs import ACTIVATION, INPUT, OUTPUT, WEIGHT, Draft
from tests.unit.execution.rig import N, Rig, deep, deep_in_eager

# --- host masters ----------------------------------------------------------------------------


def test_a_missing_master_is_refused(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    del weights["w3"]
    with pytest.raises(StoreError, match="no host master for weight 'w3'"):
        rig(graph, weights)


def test_a_master_that_is_too_small_is_refused_with_both_numbers(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    weights["w3"] = torch.randn(N, N - 1)
    with pytest.raises(StoreError, match=r"'w3' has 224 bytes; captured were bytes up to 256"):
        rig(graph, weights)


# --- embeddings by the row -------------------------------------------------------------------


def looked_up() -> TaskGraph:
    draft = Draft()
    ids, table = draft.tensor(INPUT, 2, 3, dtype="int64"), draft.tensor(WEIGHT, 100, 4, name="t")
    rows, y = draft.tensor(ACTIVATION, 2, 3, 4), draft.tensor(OUTPUT, 2, 3, 4)
    draft.task("aten.embedding.default", table, ids, out=(rows,))
    draft.task("aten.neg.default", rows, out=(y,))
    return gather_rows(draft.graph((ids,), (y,)))


def test_rows_of_an_embedding_come_anew_in_each_pass(rig: Callable[..., Rig]) -> None:
    graph, table = looked_up(), torch.randn(100, 4)
    made = rig(graph, {"t": table})
    for ids in (torch.tensor([[5, 99, 5], [0, 1, 2]]), torch.tensor([[7, 7, 7], [98, 0, 3]])):
        assert torch.equal(made(ids)[0], -table[ids])
    assert made.executor.counters.reloaded_bytes == 6 * 16


# --- residency -------------------------------------------------------------------------------


def test_a_first_pass_reloads_what_should_be_there(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights)
    made(torch.randn(N, N))
    counters = made.executor.counters
    assert counters.reloaded_bytes == counters.entry_reloaded_bytes == graph.weight_bytes
    made(torch.randn(N, N))
    counters = made.executor.counters
    assert counters.reloaded_bytes == counters.entry_reloaded_bytes == 0


def test_counters_of_a_steady_pass_are_those_of_the_plan(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights, arena_bytes=min_arena_bytes(graph, 64))
    for _ in range(2):
        made(torch.randn(N, N))
    counters = made.executor.counters
    assert counters.reloaded_bytes == made.memgraph.reloaded_bytes > 0
    assert counters.offloaded_bytes == made.memgraph.offloaded_bytes > 0
    assert counters.entry_reloaded_bytes == 0


def test_after_a_pass_the_exit_is_resident(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights, arena_bytes=min_arena_bytes(graph, 64) + 512)
    made(torch.randn(N, N))
    assert made.residents == {graph.buffers[r.buffer].key: r.extent for r in made.memgraph.exit}
    for residency in made.memgraph.exit:
        buffer = graph.buffers[residency.buffer]
        held = made.arena.slice(residency.extent, buffer.nbytes)
        assert torch.equal(held, byte_view(weights[buffer.name]))


def test_weights_of_another_pass_stay_where_this_one_has_nothing(
    rig: Callable[..., Rig],
) -> None:
    graph, weights = deep()
    made = rig(graph, weights)
    *_, last = made.memgraph.used
    assert last.end == max(node.extent.end for node in made.memgraph.nodes if node.extent)
    beside, within = Extent(last.end, 64), Extent(last.end - 64, 64)
    made.residents |= {"beside": beside, "within": within}
    made(torch.randn(N, N))
    assert made.residents["beside"] == beside and "within" not in made.residents


def test_a_weight_in_another_place_is_reloaded(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights)
    x = torch.randn(N, N)
    made(x)
    key = next(iter(made.residents))
    made.residents[key] = Extent(10**6, 256)
    assert torch.equal(made(x)[0], deep_in_eager(x, weights))
    assert made.executor.counters.entry_reloaded_bytes == N * N * 4


def test_a_pass_that_finds_the_arena_as_before_is_not_lowered_again(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, weights = deep()
    lowered: list[frozenset[int]] = []

    def counted(memgraph: MemGraph, **how: Any) -> Program:
        lowered.append(how.get("missing", frozenset()))
        return lower(memgraph, **how)

    monkeypatch.setattr(executor, "lower", counted)
    made = rig(graph, weights)
    lowered.clear()
    x, most = torch.randn(N, N), executor.MOST_PROGRAMS
    for name in [*weights][:most] * 2:  # a weight that is missing, each time another one
        made(x)
        del made.residents[next(key for key in made.residents if key.startswith(name))]
        assert torch.equal(made(x)[0], deep_in_eager(x, weights))
    assert len(set(lowered)) == len(lowered) == 1 + most  # the first pass missed every weight
    made.residents.clear()
    made(x)
    assert lowered[-1] == lowered[0]  # the oldest was dropped, so that there are never more


def test_while_a_pass_runs_nothing_counts_as_resident(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    seen: list[Residents] = []
    made = rig(
        graph, weights, hooks=[OpHook(before=lambda t, o: seen.append(dict(made.residents)))]
    )
    made(torch.randn(N, N))
    made(torch.randn(N, N))
    assert seen and not any(seen)


def test_an_error_leaves_nothing_resident_and_the_next_pass_right(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    faults = [True]

    def after(task: Task, results: tuple[torch.Tensor, ...]) -> None:
        if task.index == 5 and faults:
            faults.pop()
            raise ValueError("hook failed")

    made = rig(
        graph, weights, arena_bytes=min_arena_bytes(graph, 64) + 256, hooks=[OpHook(after=after)]
    )
    x = torch.randn(N, N)
    with pytest.raises(ValueError, match="hook failed"):
        made(x)
    assert made.residents == {}
    assert torch.equal(made(x)[0], deep_in_eager(x, weights))


# --- poison ----------------------------------------------------------------------------------


def test_vacated_extents_are_poisoned(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights, poison=True)
    made.arena.bytes.zero_()
    made(torch.randn(N, N))
    kept = torch.zeros(made.arena.nbytes, dtype=torch.bool)
    for residency in made.memgraph.exit:
        kept[residency.extent.offset : residency.extent.end] = True
    dropped = [n.extent for n in made.memgraph.nodes if n.kind is NodeKind.DROP]
    assert dropped
    for extent in dropped:
        assert extent is not None and not kept[extent.offset : extent.end].any()
        assert (made.arena.slice(extent, extent.nbytes) == 0xFF).all()


def test_without_poison_vacated_extents_are_left_as_they_are(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights)
    made.arena.bytes.zero_()
    made(torch.randn(N, N))
    assert not (made.arena.bytes == 0xFF).all()
    drops = [n.id for n in made.memgraph.nodes if n.kind is NodeKind.DROP]
    assert drops and not set(drops) & set(made.executor.actions)
