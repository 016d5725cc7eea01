"""Sizes that follow from a taskgraph, worked out by hand."""

from __future__ import annotations

import pytest

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.liveness import (
    ample_arena_bytes,
    extent_bytes,
    live_activation_bytes,
    min_arena_bytes,
    needed_arena_bytes,
    require_feasible,
    working_set_bytes,
)
from tests.unit.planning.sketches import sketch

EMPTY = TaskGraph("empty", (), (), ())


def test_an_empty_buffer_gets_one_unit() -> None:
    assert extent_bytes(0, 512) == 512


def test_uses_are_reads_writes_and_touches_in_order() -> None:
    graph = sketch("w:1 a1:1 a2:1", "w -> a1", "~ a1", "join a1 ->", "a1 -> a1")
    assert graph.uses == ((0,), (0, 1, 2, 3), ())


def test_a_buffer_that_a_task_names_twice_is_used_once() -> None:
    assert sketch("a:1", "a -> a ~ a").uses == ((0,),)


def test_the_working_set_is_all_that_a_task_names_in_the_arena() -> None:
    graph = sketch("w:100 a1:10 a2:1 s:999 i:999 o:999 c:999", "w s i c -> a1 o ~ a2")
    assert working_set_bytes(graph, graph.tasks[0], 64) == 128 + 64 + 64


def test_a_buffer_that_a_task_changes_counts_once() -> None:
    graph = sketch("a:64", "a -> a")
    assert working_set_bytes(graph, graph.tasks[0], 64) == 64


def test_the_least_arena_is_the_largest_working_set() -> None:
    assert min_arena_bytes(sketch("w1:64 w2:64 a:64", "w1 -> a", "w1 w2 -> a", "w1 ->"), 64) == 192
    assert min_arena_bytes(EMPTY, 64) == 0


def test_the_ample_arena_has_bytes_for_every_paged_buffer() -> None:
    graph = sketch("w1:100 w2:1 a:64 s:999", "w1 s -> a")
    assert ample_arena_bytes(graph, 64) == 128 + 64 + 64


def test_live_activations_run_from_first_to_last_use() -> None:
    graph = sketch("a1:64 a2:128 w:999", "-> a1", "a1 w -> a2", "w ->", "a2 ->", "w ->")
    assert live_activation_bytes(graph, 64) == [64, 192, 128, 128, 0]


def test_unused_activations_are_never_live() -> None:
    assert live_activation_bytes(sketch("a1:64 a2:64", "-> a1"), 64) == [64]


def test_needed_is_all_weights_and_the_most_live_activations() -> None:
    graph = sketch("w1:64 w2:64 a1:64 a2:64", "w1 -> a1", "a1 -> a2", "a2 ->")
    assert needed_arena_bytes(graph, 64) == 128 + 128
    assert needed_arena_bytes(EMPTY, 64) == 0


def test_an_arena_of_the_least_size_is_feasible() -> None:
    graph = sketch("w:64 a:64", "w -> a")
    require_feasible(graph, 128, 64)
    require_feasible(EMPTY, 0, 64)


def test_a_smaller_one_is_refused_with_the_task_and_both_numbers() -> None:
    graph = sketch("w1:64 w2:640 a:64", "w1 -> a", "w2 -> a")
    with pytest.raises(PlanInfeasibleError) as caught:
        require_feasible(graph, 640, 64)
    message = str(caught.value)
    assert "task 1 aten.op.default (layer1)" in message
    assert "needs 704 B (704 bytes) resident together" in message
    assert "device_budget is 640 bytes" in message
    assert "Raise finepage.device_budget to >= 704" in message


def test_what_is_needed_around_the_arena_is_added_to_both_numbers() -> None:
    with pytest.raises(PlanInfeasibleError) as caught:
        require_feasible(sketch("a:640", "-> a"), 512, 64, non_arena_bytes=1000)
    message = str(caught.value)
    assert "min_budget_bytes 1640" in message
    assert "device_budget is 1512 bytes, 512 of them for the arena" in message
