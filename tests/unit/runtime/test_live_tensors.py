"""Tensors that passes have seen count while somebody holds them, and no longer."""

from __future__ import annotations

import gc

import torch

from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.runtime.live_tensors import Held
from ds_finepage.runtime.pass_table import FEW_HELD_BYTES, Pass
from ds_finepage.runtime.stats import PassStats


def test_what_nobody_holds_is_not_counted() -> None:
    held = Held()
    kept, dropped = torch.ones(100), torch.ones(50)
    held.note([kept, dropped])
    del dropped
    gc.collect()
    assert held.bytes_beside([]) == 400
    del kept
    assert held.bytes_beside([]) == 0


def test_what_is_given_is_counted_by_whoever_is_given_it() -> None:
    held = Held()
    rows, states = torch.ones(100), torch.ones(50)
    held.note([rows, states])
    assert held.bytes_beside([rows[10:]]) == 200
    assert held.bytes_beside([states]) == 400


def test_a_view_holds_all_of_its_bytes() -> None:
    held = Held()
    whole = torch.ones(100)
    held.note([whole])
    assert held.bytes_beside([]) == 400
    part = whole[:1]
    del whole
    assert held.bytes_beside([]) == 400
    assert part.numel() == 1


def test_tensors_of_many_passes_add_up() -> None:
    held = Held()
    tensors = [torch.ones(10) for _ in range(3)]
    for number, tensor in enumerate(tensors):
        held.note([tensor])
        assert held.bytes_beside([tensor]) == 40 * number
    assert held.bytes_beside([]) == 120


def a_pass(min_budget_bytes: int) -> Pass:
    graph = TaskGraph("nothing", (), (), ())
    return Pass(graph, PassStats("nothing", 0, 0, 0, min_budget_bytes, min_budget_bytes))


def test_room_is_left_ahead_of_need_where_there_is_some() -> None:
    found = a_pass(10**6)
    found.leave_room(FEW_HELD_BYTES, 10**9)
    assert (found.held_bytes, found.stats.min_budget_bytes) == (0, 10**6)
    found.leave_room(10**6, 10**9)
    found.leave_room(10**6 + 1, 10**9)
    assert found.held_bytes == 1_250_000
    assert found.stats.min_budget_bytes == found.stats.needed_budget_bytes == 2_250_000
    found.leave_room(10**5, 10**9)  # a plan that has room for more is as good
    assert found.held_bytes == 1_250_000


def test_room_is_taken_back_where_it_stands_in_the_way() -> None:
    found = a_pass(10**6)
    found.leave_room(10**6, 2 * 10**6)
    found.leave_room(10**6 + 5, 2 * 10**6)
    assert found.held_bytes == 10**6 + 5
    assert not found.has_room(10**6 + 5, 2 * 10**6)
    found.leave_room(10**5, 2 * 10**6)
    assert (found.held_bytes, found.stats.min_budget_bytes) == (10**5, 11 * 10**5)
    found.leave_room(0, 10**6)
    assert (found.held_bytes, found.stats.min_budget_bytes) == (0, 10**6)
