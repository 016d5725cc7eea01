"""Small passes: what counts as small, and that no layout is no plan."""

from __future__ import annotations

import random

from ds_finepage.checker.checker import check
from ds_finepage.graph.taskgraph import Buffer, BufferKind, Task, TaskGraph
from ds_finepage.planning.finepage.exact import MAX_TASKS, is_tiny, plan_exact
from ds_finepage.planning.problem import Problem
from tests.property.brute_force import tiny_graph
from tests.property.matmul_chains import matmul_chain


def test_a_long_pass_is_not_tiny() -> None:
    assert is_tiny(matmul_chain([8] * 6))
    assert not is_tiny(matmul_chain([8] * (MAX_TASKS + 2)))


def test_touches_are_left_to_others() -> None:
    graph = TaskGraph(
        "touch",
        (Buffer(0, BufferKind.ACTIVATION, 64),),
        (),
        (Task(0, "op", touches=(0,)), Task(1, "finepage.join", reads=(0,))),
    )
    assert not is_tiny(graph)


def test_entry_is_exit() -> None:
    for seed in range(50):
        graph = tiny_graph(random.Random(seed))
        arena_bytes = sum(b.nbytes for b in graph.buffers) * 2 // 3 // 64 * 64
        found = plan_exact(Problem(graph, arena_bytes=arena_bytes, alignment=64))
        if found is not None:
            assert set(check(found).entry) == set(found.exit)


def test_an_arena_that_is_too_small_gives_no_plan() -> None:
    graph = tiny_graph(random.Random(0))
    assert plan_exact(Problem(graph, arena_bytes=64, alignment=64)) is None
