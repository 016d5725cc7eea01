"""Tensors that passes have seen count while somebody holds them, and no longer."""

from __future__ import annotations

import gc

import pytest
import torch

from ds_finepage.graph.taskgraph import Buffer, BufferKind, GraphInput, TaskGraph, TensorView
from ds_finepage.planning.pipeline import Needs
from ds_finepage.runtime import live_tensors
from ds_finepage.runtime.live_tensors import LiveTensors
from ds_finepage.runtime.passes import IGNORED_LIVE_BYTES, Pass


def test_what_nobody_holds_is_not_counted() -> None:
    live = LiveTensors()
    kept, dropped = torch.ones(100), torch.ones(50)
    live.note([kept, dropped])
    del dropped
    gc.collect()
    assert live.bytes_beside([]) == 400
    del kept
    assert live.bytes_beside([]) == 0


def test_what_is_given_is_counted_by_whoever_is_given_it() -> None:
    live = LiveTensors()
    tensors = [torch.ones(10) for _ in range(3)]
    for number, tensor in enumerate(tensors):
        live.note([tensor])
        assert live.bytes_beside([tensor[5:]]) == 40 * number
    assert live.bytes_beside([]) == 120


def test_a_view_holds_all_of_its_bytes() -> None:
    live = LiveTensors()
    whole, view = torch.ones(100), torch.ones(50)[:1]
    live.note([whole, view])
    part = whole[:1]
    del whole  # before the next pass asks
    assert live.bytes_beside([]) == 600
    assert live.bytes_beside([part]) == 200
    del view
    assert live.bytes_beside([]) == 400


NOTHING = TaskGraph("nothing", (), (), ())


def a_pass(min_budget_bytes: int, graph: TaskGraph = NOTHING) -> Pass:
    needs = Needs(
        graph=graph,
        alignment=64,
        non_arena_bytes=min_budget_bytes,
        min_arena_bytes=0,
        needed_arena_bytes=0,
    )
    return Pass(graph, needs)


def test_room_is_left_ahead_of_need_where_there_is_some() -> None:
    found = a_pass(10**6)
    found.leave_room(IGNORED_LIVE_BYTES, 10**9)
    assert (found.live_bytes, found.needs.min_budget_bytes) == (0, 10**6)
    found.leave_room(10**6, 10**9)
    assert found.live_bytes == 1_250_000
    found.leave_room(1_250_000, 10**9)
    assert found.live_bytes == 1_250_000
    assert found.needs.min_budget_bytes == found.needs.needed_budget_bytes == 2_250_000
    found.leave_room(10**5, 10**9)  # a plan that has room for more is as good
    assert found.live_bytes == 1_250_000


def test_a_first_reservation_spares_a_small_part_of_the_budget() -> None:
    found = a_pass(10**6)
    found.leave_room(10**6, 64 * 10**5)
    assert found.live_bytes == 11 * 10**5
    found.leave_room(11 * 10**5 + 1, 64 * 10**5)
    assert found.live_bytes == 11 * 10**5 * 5 // 4


def test_room_is_taken_back_where_it_stands_in_the_way() -> None:
    found = a_pass(10**6)
    found.leave_room(10**6, 2 * 10**6)
    found.leave_room(10**6 + 5, 2 * 10**6)
    assert found.live_bytes == 10**6 + 5
    assert not found.has_room(10**6 + 5, 2 * 10**6)
    found.leave_room(10**5, 2 * 10**6)
    assert (found.live_bytes, found.needs.min_budget_bytes) == (10**5, 11 * 10**5)
    found.leave_room(0, 10**6)
    assert (found.live_bytes, found.needs.min_budget_bytes) == (0, 10**6)


def test_a_pass_leaves_room_for_another_order_of_its_rows() -> None:
    rows = TensorView(0, 0, "float32", (1, 2, 2000, 64), (1,) * 4)
    state = Buffer(0, BufferKind.STATE, 4 * 10**6)
    graph = TaskGraph("step", (state,), (rows,), (), inputs=(GraphInput(0, 0),))
    found, live, given = a_pass(10**6, graph), LiveTensors(), (torch.ones(1),)
    live.reserve(found, given, 10**9)
    assert found.live_bytes == 0
    live.reserve(found, given, 2 * 10**6, is_reordered=True)  # the same pass, in another generation
    assert found.live_bytes == 10**6


def test_results_of_a_pass_that_repeats_count_while_somebody_holds_them() -> None:
    live, found, held = LiveTensors(), a_pass(1000), []
    for number in range(4):
        live.reserve(found, (), 10**9)
        assert found.live_bytes >= 10**6 * number
        held.append(torch.ones(10**6 // 4))
        live.note(held[-1:])
    held.clear()
    live.reserve(found, (), 10**6)
    assert found.live_bytes == 0


def test_the_same_bytes_are_not_collected_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole collection walks all of torch."""
    collected: list[tuple[int, ...]] = []
    monkeypatch.setattr(live_tensors.gc, "collect", lambda *young: collected.append(young))
    live, found, other = LiveTensors(), a_pass(1000), a_pass(0)
    kept = [torch.ones(IGNORED_LIVE_BYTES)]
    for whole in (1, 1, 2):
        for each in (found, other):  # they take turns
            live.note(kept)
            live.reserve(each, (), 5 * IGNORED_LIVE_BYTES if each is other else 2000)
        assert collected.count(()) == whole
        kept += [torch.ones(8)] if collected.count((1,)) == 2 else []
