"""Taskgraphs in which cheap tasks run again compute the same, in less room, by right plans."""

from __future__ import annotations

import dataclasses
import random
import time
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_finepage.checker.checker import check
from ds_finepage.graph.profiles import load_profile
from ds_finepage.graph.taskgraph import Buffer, BufferKind, Task, TaskGraph
from ds_finepage.planning.finepage import search
from ds_finepage.planning.finepage.search import min_split_arena_bytes, plan_finepage
from ds_finepage.planning.liveness import ample_arena_bytes, live_activation_bytes, min_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.recompute import recompute
from ds_finepage.planning.simulator import simulate
from tests.property.strategies import taskgraphs
from tests.property.test_memgraphs import modest
from tests.property.token_interpreter import run_random_order
from tests.property.value_interpreter import values_at_end

ALIGNMENT = 64


def layered(rng: random.Random, num_tasks: int) -> TaskGraph:
    """Draw a pass of many cheap tasks whose results are used again at any time, and some not."""
    buffers = [Buffer(i, BufferKind.INPUT, 64, f"i{i}") for i in range(2)]
    buffers += [Buffer(i, BufferKind.STATE, 64, f"s{i}") for i in range(2, 4)]
    tasks = []
    for index in range(num_tasks):
        reads = {rng.randrange(len(buffers)) for _ in range(rng.randint(1, 3))}
        is_cheap = rng.random() < 0.6
        state = rng.randint(2, 3)
        if rng.random() < 0.05:
            tasks.append(_task(index, is_cheap, reads | {state}, {state}))
            continue
        made = {len(buffers)}
        if rng.random() < 0.3:
            buffers.append(
                Buffer(len(buffers), BufferKind.WEIGHT, rng.choice([1, 4096]), f"w{index}")
            )
            reads, made = reads | {len(buffers) - 1}, {len(buffers)}
        kind = BufferKind.OUTPUT if rng.random() < 0.1 else BufferKind.ACTIVATION
        buffers.append(Buffer(len(buffers), kind, rng.choice([64, 1024, 5000]), f"a{index}"))
        tasks.append(_task(index, is_cheap, reads, made))
    return TaskGraph("layered", tuple(buffers), (), tuple(tasks))


def _task(index: int, is_cheap: bool, reads: set[int], writes: set[int]) -> Task:
    op = "aten.mul.Tensor" if is_cheap else "aten.mm.default"
    return Task(
        index, op, f"layer{index}", reads=tuple(sorted(reads)), writes=tuple(sorted(writes))
    )


def is_right(graph: TaskGraph, found: TaskGraph) -> None:
    """Hold a taskgraph in which tasks run again against the one that was given."""
    assert values_at_end(found) == values_at_end(graph)
    assert min_arena_bytes(found, ALIGNMENT) <= min_arena_bytes(graph, ALIGNMENT)
    assert [t.index for t in found.tasks] == list(range(len(found.tasks)))
    assert [b.id for b in found.buffers] == list(range(len(found.buffers)))
    if found is not graph:
        before = max(live_activation_bytes(graph, ALIGNMENT))
        assert max(live_activation_bytes(found, ALIGNMENT)) < before


@pytest.mark.parametrize("seed", range(150))
def test_the_same_values_in_less_room(seed: int) -> None:
    graph = layered(random.Random(seed), 5 + seed)
    is_right(graph, recompute(graph, ALIGNMENT))


def test_most_of_these_passes_have_something_to_run_again() -> None:
    drawn = [layered(random.Random(seed), 5 + seed) for seed in range(150)]
    assert sum(recompute(graph, ALIGNMENT) is not graph for graph in drawn) > 75


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("split", [False, True])
def test_any_order_reads_the_right_tokens(seed: int, split: bool) -> None:
    rng = random.Random(seed)
    graph = layered(rng, rng.randint(5, 40))
    again = recompute(graph, ALIGNMENT)
    profile = load_profile("v100-16gb")
    least = (min_split_arena_bytes if split else min_arena_bytes)(graph, ALIGNMENT)
    ample = ample_arena_bytes(graph, ALIGNMENT)
    for planned in (graph, again):
        for arena_bytes in (least, rng.randint(least, ample)):
            found = check(
                plan_finepage(
                    Problem(
                        planned,
                        arena_bytes=arena_bytes,
                        alignment=ALIGNMENT,
                        profile=rng.choice([None, profile]),
                        split=split,
                    )
                )
            )
            assert found.peak_bytes <= arena_bytes
            assert set(found.entry) == set(found.exit)
            assert values_at_end(found.graph) == values_at_end(graph)
            for _ in range(3):
                run_random_order(found, rng)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("split", [False, True])
def test_a_plan_is_never_worse_for_it(seed: int, split: bool) -> None:
    rng = random.Random(seed)
    graph = layered(rng, rng.randint(5, 40))
    least, ample = min_arena_bytes(graph, ALIGNMENT), ample_arena_bytes(graph, ALIGNMENT)
    profile = rng.choice([None, load_profile("v100-16gb")])
    figures = []
    for arena_bytes in [least] + [rng.randint(least, ample) for _ in range(3)]:
        for rewrite in (recompute, lambda graph, **_: graph):
            problem = Problem(graph, arena_bytes, ALIGNMENT, profile=profile, split=split)
            with mock.patch.object(search, "recompute", rewrite):
                plan = plan_finepage(problem)
            total_ns = 0 if profile is None else simulate(plan, profile).total_ns
            figures.append((total_ns, plan.reloaded_bytes + plan.offloaded_bytes))
    for (total_ns, moved), (total_without_ns, moved_without) in zip(
        figures[::2], figures[1::2], strict=True
    ):
        assert total_ns * 100 <= total_without_ns * 101
        assert total_ns < total_without_ns or moved <= moved_without


@modest
@given(graph=taskgraphs(), data=st.data())
def test_odd_taskgraphs_too(graph: TaskGraph, data: st.DataObject) -> None:
    """In-place changes, touches, joins, results of several sorts at once."""
    ops = st.sampled_from(["aten.mul.Tensor", "aten.mul.Tensor", "aten.mm.default"])
    tasks = [
        dataclasses.replace(t, op=data.draw(ops), flops=0) if t.op == "test.plain" else t
        for t in graph.tasks
    ]
    graph = dataclasses.replace(graph, tasks=tuple(tasks))
    found = recompute(graph, ALIGNMENT)
    is_right(graph, found)
    least = min_arena_bytes(graph, ALIGNMENT)
    planned = check(plan_finepage(Problem(found, arena_bytes=least, alignment=ALIGNMENT)))
    run_random_order(planned, random.Random(0))


def test_a_long_pass_takes_no_time() -> None:
    times = []
    for num_layers in (100, 400):
        graph = of_layers(num_layers)
        start = time.process_time()
        found = recompute(graph, ALIGNMENT)
        times.append(time.process_time() - start)
        assert len(found.tasks) > len(graph.tasks)
    assert times[1] < 8 * max(times[0], 0.05)


def of_layers(num_layers: int) -> TaskGraph:
    """Build a pass whose layers all use one mask."""
    buffers = [
        Buffer(0, BufferKind.INPUT, 64),
        Buffer(1, BufferKind.ACTIVATION, 4096),
        Buffer(2, BufferKind.ACTIVATION, 64),
    ]
    tasks = [Task(0, "aten.cos.default", reads=(0,), writes=(1,))]
    tasks.append(Task(1, "aten.mm.default", reads=(0,), writes=(2,)))
    for _ in range(num_layers):
        at, x = len(buffers), len(buffers) - 1
        buffers += [Buffer(at + i, BufferKind.ACTIVATION, n) for i, n in enumerate((64, 9000, 64))]
        for reads, made in (((1, x), at), ((at,), at + 1), ((at + 1,), at + 2)):
            tasks.append(Task(len(tasks), "aten.mm.default", reads=reads, writes=(made,)))
    return TaskGraph("layers", tuple(buffers), (), tuple(tasks))
