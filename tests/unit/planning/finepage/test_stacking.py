"""What stands in the arena is left there, as far as there is room."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.graph.memgraph import Extent, MemGraph
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.finepage.search import min_split_arena_bytes, plan_finepage
from ds_finepage.planning.finepage.stacking import residents_of, spread_order, stack_down
from ds_finepage.planning.liveness import ample_arena_bytes, min_arena_bytes
from ds_finepage.planning.problem import Problem
from tests.property.matmul_chains import matmul_chain, random_chain
from tests.property.token_interpreter import run_random_order

UNIT = 64


def places(memgraph: MemGraph) -> dict[str, Extent]:
    return {memgraph.graph.buffers[r.buffer].key: r.extent for r in memgraph.entry}


def with_larger_activations(graph: TaskGraph, factor: int) -> TaskGraph:
    """Return the pass as it would be for a longer prompt."""
    return replace(
        graph,
        buffers=tuple(
            replace(b, nbytes=b.nbytes * factor) if b.kind is BufferKind.ACTIVATION else b
            for b in graph.buffers
        ),
    )


def test_the_front_of_the_order_is_spread_over_the_input() -> None:
    assert spread_order([]) == []
    assert spread_order([7]) == [7]
    assert spread_order(list(range(8))) == [0, 4, 2, 6, 1, 5, 3, 7]
    for size in range(1, 40):
        order = spread_order(list(range(size)))
        assert sorted(order) == list(range(size))
        half = sorted(order[: (size + 1) // 2])
        assert all(b - a <= 4 for a, b in zip(half, half[1:], strict=False))


def test_a_stack_grows_downwards() -> None:
    assert stack_down([3, 1], {1: 10, 3: 30}, 100) == {3: Extent(70, 30), 1: Extent(60, 10)}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("percent", [40, 60, 80])
def test_a_pass_with_less_room_keeps_a_part_of_what_stands(split: bool, percent: int) -> None:
    step = matmul_chain([256] * 13, num_rows=1)
    prompt = with_larger_activations(step, 64)
    arena_bytes = step.weight_bytes * percent // 100 // UNIT * UNIT
    settings = {"arena_bytes": arena_bytes, "alignment": UNIT, "split": split}
    kept = check(plan_finepage(Problem(step, **settings)))
    alone = check(plan_finepage(Problem(prompt, **settings)))
    beside = check(plan_finepage(Problem(prompt, **settings, shared=residents_of(kept))))
    assert places(beside).items() <= places(kept).items()
    assert set(beside.entry) == set(beside.exit)
    # It gives up little by it, and has no more to bring in when it comes.
    entering = sum(e.nbytes for e in places(alone).values())
    assert beside.reloaded_bytes < alone.reloaded_bytes + entering
    largest = max(b.nbytes for b in step.buffers)
    assert beside.reloaded_bytes <= alone.reloaded_bytes + 3 * largest


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_any_order_is_right_beside_another_pass(seed: int, split: bool) -> None:
    rng = random.Random(seed)
    step = random_chain(rng)
    prompt = with_larger_activations(step, rng.choice([1, 2, 5]))
    least = min_split_arena_bytes if split else min_arena_bytes
    room = max(least(step, UNIT), least(prompt, UNIT))
    arena_bytes = rng.randint(room, max(room, ample_arena_bytes(prompt, UNIT)))
    settings = {"arena_bytes": arena_bytes, "alignment": UNIT, "split": split}
    kept = plan_finepage(Problem(step, **settings))
    beside = check(plan_finepage(Problem(prompt, **settings, shared=residents_of(kept))))
    assert beside.peak_bytes <= arena_bytes
    for _ in range(4):
        run_random_order(beside, rng)
