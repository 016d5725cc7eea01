"""Rows of a KV cache in host memory: the arena keeps a copy of them from call to call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from ds_finepage.execution.host_ops import identify
from ds_finepage.graph.arguments import Length
from ds_finepage.graph.memgraph import Extent, MemGraph, NodeKind, Residency
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.builder import MemGraphBuilder
from tests.unit.execution.graphs import HOST, INPUT, OUTPUT, WEIGHT, Draft
from tests.unit.execution.rig import N, Rig

LONGEST = 8
ROW_BYTES = 4 * N


def appending() -> TaskGraph:
    """Put a row behind those of the call, and return all of them, negated."""
    draft = Draft()
    live, rows = draft.tensor(HOST, LONGEST, N), draft.tensor(WEIGHT, LONGEST + 1, N, name="rows")
    new, out = draft.tensor(INPUT, 1, N), draft.tensor(OUTPUT, LONGEST + 1, N)
    behind = draft.view(rows, (1, N), (N, 1))
    draft.task("aten.copy_.default", behind, new, out=(behind,), changes=(behind,))
    draft.task("aten.neg.default", rows, out=(out,))
    before, after = Length(LONGEST, "n"), Length(LONGEST + 1, "n + 1")
    for ref, num in ((live, before), (rows, after), (out, after)):
        view = draft.tensors[ref.tensor]
        draft.tensors[ref.tensor] = replace(view, shape=(num, N))
        nbytes = Length(int(num) * ROW_BYTES, f"({num.formula}) * {ROW_BYTES}")
        gather = live.tensor if ref is rows else None
        draft.buffers[view.buffer] = replace(
            draft.buffers[view.buffer], nbytes=nbytes, gather=gather
        )
    begin = Length(LONGEST * N, f"n * {N}")
    draft.tensors[behind.tensor] = replace(draft.tensors[behind.tensor], offset=begin)
    graph = draft.graph((live, new), (out,))
    return replace(graph, symbols=(("n", 2),))


def call(made: Rig, live: torch.Tensor, identity: object) -> int:
    """Run a pass behind some rows; return the bytes that it reloads."""
    if identity is not None:
        identify(live, identity)
    new = torch.randn(1, N)
    args = live, new, len(live)
    assert made.executor.set_sizes(args)
    assert torch.equal(made(*args)[0], -torch.cat([live, new]))
    room = rest(live)
    room[len(live)] = new
    return made.executor.counters.reloaded_bytes


def rest(live: torch.Tensor) -> torch.Tensor:
    """Return the whole room that some rows lie in."""
    return live.as_strided((LONGEST + 1, N), (N, 1), 0)


@pytest.fixture
def room() -> torch.Tensor:
    return torch.randn(LONGEST + 1, N)


def test_rows_that_the_passes_append_are_in_place(
    rig: Callable[..., Rig], room: torch.Tensor
) -> None:
    made, own = rig(appending()), object()
    assert call(made, room[:3], own) == 3 * ROW_BYTES
    assert made.executor.entry_missing
    assert call(made, room[:4], own) == 0
    assert not made.executor.entry_missing
    assert call(made, room[:5], own) == 0


def test_rows_that_came_by_another_way_are_reloaded(
    rig: Callable[..., Rig], room: torch.Tensor
) -> None:
    made, own = rig(appending()), object()
    call(made, room[:3], own)
    assert call(made, room[:7], own) == 3 * ROW_BYTES


def test_rows_that_were_cut_off_are_not_valid(rig: Callable[..., Rig], room: torch.Tensor) -> None:
    made, own = rig(appending()), object()
    call(made, room[:6], own)
    assert call(made, room[:2], own) == 0
    room[3:] = torch.randn(LONGEST - 2, N)
    assert call(made, room[:6], own) == 3 * ROW_BYTES


def test_rows_of_another_cache_are_not_valid(rig: Callable[..., Rig], room: torch.Tensor) -> None:
    made, own = rig(appending()), object()
    call(made, room[:3], own)
    assert call(made, torch.randn(LONGEST + 1, N)[:4], object()) == 4 * ROW_BYTES
    assert call(made, room[:4], own) == 4 * ROW_BYTES


def test_rows_that_another_plan_keeps_elsewhere_are_reloaded(
    rig: Callable[..., Rig], room: torch.Tensor
) -> None:
    made, own = rig(appending()), object()
    call(made, room[:3], own)
    made.residents["rows[0:288]"] = Extent(4096, 320)
    assert call(made, room[:4], own) == 4 * ROW_BYTES


def test_rows_that_stream_here_have_no_new_ones_where_another_plan_keeps_them(
    rig: Callable[..., Rig], room: torch.Tensor
) -> None:
    made, own = rig(moving()), object()
    call(made, room[:3], own)
    streaming = rig(passing())
    streaming.residents = made.residents
    assert call(streaming, room[:4], own) == 4 * ROW_BYTES
    assert made.residents["rows[0:288]"] == EXTENT  # which the second plan leaves alone
    assert call(made, room[:5], own) == 5 * ROW_BYTES + ROW_BYTES + 5 * ROW_BYTES


def test_rows_without_an_identity_are_reloaded(rig: Callable[..., Rig], room: torch.Tensor) -> None:
    made = rig(appending())
    for num in (3, 4):
        assert call(made, room[:num], None) == num * ROW_BYTES
    assert made.residents.keys() == {"rows[0:288]"}


def test_rows_of_other_extents_are_cut_off_too(rig: Callable[..., Rig], room: torch.Tensor) -> None:
    """A plan that does not know them leaves them in place, and they may be used again later."""
    made, own = rig(appending()), object()
    call(made, room[:6], own)
    extent = made.residents.pop("rows[0:288]")
    identity, nbytes = made.residents.rows.pop("rows[0:288]")
    assert (identity, nbytes) == (own, 7 * ROW_BYTES)
    elsewhere = replace(extent, offset=extent.end)
    made.residents["others"], made.residents.rows["others"] = elsewhere, (own, nbytes)
    call(made, room[:2], own)
    assert made.residents.rows["others"] == (own, 2 * ROW_BYTES)
    del made.residents["others"]
    call(made, room[:3], own)
    assert "others" not in made.residents.rows


EXTENT, ELSEWHERE = Extent(0, 320), Extent(512, 320)


def evicting() -> MemGraph:
    """Offload the rows between the task that changes them and the one that reads them."""
    builder, tasks = MemGraphBuilder(appending(), "horizon", 1024, 64), appending().tasks
    builder.begin(())
    builder.alloc(1, EXTENT, [])
    builder.reload(1)
    builder.compute(tasks[0])
    builder.evict(1)
    builder.alloc(1, ELSEWHERE, [])
    builder.reload(1)
    builder.compute(tasks[1])
    builder.drop(1)
    return builder.finish()


def moving() -> MemGraph:
    """Reload rows that were kept, to another place."""
    builder = MemGraphBuilder(appending(), "horizon", 1024, 64)
    builder.begin((Residency(1, EXTENT),))
    builder.drop(1)
    builder.alloc(1, ELSEWHERE, [])
    builder.reload(1)
    for task in appending().tasks:
        builder.compute(task)
    builder.evict(1)
    builder.alloc(1, EXTENT, [])
    builder.reload(1)
    return builder.finish()


def passing() -> MemGraph:
    """Stream the rows."""
    builder = MemGraphBuilder(appending(), "horizon", 1024, 64)
    builder.begin(())
    builder.alloc(1, ELSEWHERE, [])
    builder.reload(1)
    for task in appending().tasks:
        builder.compute(task)
    builder.drop(1)
    return builder.finish()


def test_a_reload_within_a_pass_brings_all_rows(
    rig: Callable[..., Rig], room: torch.Tensor
) -> None:
    made, own = rig(moving()), object()
    for num in (3, 4):
        call(made, room[:num], own)
        made.arena.bytes[512:] = 0xFF


def test_rows_that_were_offloaded_come_back_as_they_were_changed(
    rig: Callable[..., Rig], room: torch.Tensor
) -> None:
    memgraph = evicting()
    assert any(n.kind is NodeKind.OFFLOAD for n in memgraph.nodes)
    made = rig(memgraph)
    for num in (3, 5):
        call(made, room[:num], None)
