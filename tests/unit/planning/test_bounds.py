"""The lower bounds on bytes and time: by hand, and against the best of all schedules."""

from __future__ import annotations

import dataclasses
import random
from functools import partial

import pytest

from ds_finepage.graph.taskgraph import Buffer, BufferKind, Task, TaskGraph
from ds_finepage.planning.bounds import lower_bound, lower_bound_bytes
from ds_finepage.planning.rewrite.embeddings import gather_rows
from tests.property.brute_force import fewest_moved_bytes
from tests.property.experts import layers_of_experts
from tests.property.matmul_chains import matmul_chain

W, A = BufferKind.WEIGHT, BufferKind.ACTIVATION


def graph_of(sizes: list[tuple[BufferKind, int]], tasks: list[tuple[int, ...]]) -> TaskGraph:
    """Tasks by the buffers that they name: weights are read, activations written."""
    buffers = tuple(Buffer(i, kind, nbytes) for i, (kind, nbytes) in enumerate(sizes))
    return TaskGraph(
        "bounds",
        buffers,
        (),
        tuple(
            Task(
                i,
                "op",
                reads=tuple(sorted(b for b in named if buffers[b].kind is W)),
                writes=tuple(sorted(b for b in named if buffers[b].kind is not W)),
            )
            for i, named in enumerate(tasks)
        ),
    )


def chain_of(num_weights: int, nbytes: int) -> TaskGraph:
    """A chain of equal weights, one a task."""
    return graph_of([(W, nbytes)] * num_weights, [(i,) for i in range(num_weights)])


def test_nothing_to_reload_when_all_fits() -> None:
    assert lower_bound_bytes(chain_of(4, 100), 400, 1) == 0
    assert lower_bound_bytes(chain_of(4, 100), 10**9, 512) == 0


def test_nothing_to_reload_without_weights() -> None:
    assert lower_bound_bytes(TaskGraph("", (), (), ()), 0, 1) == 0
    assert lower_bound_bytes(graph_of([(A, 100)], [(0,)]), 100, 1) == 0


def test_a_single_extent_keeps_nothing() -> None:
    """With room for one weight, each of two or more is gone when it is needed again."""
    assert lower_bound_bytes(chain_of(4, 100), 100, 1) == 400


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5])
def test_equal_weights_on_a_cycle(room: int) -> None:
    """Known: farthest-next-use misses n (n - room) / (n - 1) of n pages a round."""
    bound = lower_bound_bytes(chain_of(5, 1000), room * 1000, 1)
    assert bound == 1000 * 5 * (5 - room) // 4


def test_activations_of_a_task_take_room() -> None:
    graph = graph_of([(W, 100), (W, 100), (A, 70)], [(0,), (1,), (2,)])
    assert lower_bound_bytes(graph, 200, 1) == 70
    assert lower_bound_bytes(graph, 269, 1) == 1
    assert lower_bound_bytes(graph, 270, 1) == 0


def test_activations_elsewhere_do_not() -> None:
    """They may have been offloaded: only what a task names is certain to be resident."""
    graph = graph_of([(W, 100), (W, 100), (A, 70), (A, 70)], [(2,), (3,), (0,), (1,), (2, 3)])
    assert lower_bound_bytes(graph, 340, 1) == 0
    assert lower_bound_bytes(graph, 200, 1) == 140


def test_unused_weights_and_other_kinds_do_not_count() -> None:
    outside = [(BufferKind.STATE, 500), (BufferKind.INPUT, 500), (BufferKind.CONSTANT, 500)]
    graph = graph_of([(W, 100), (W, 10**6), *outside], [(0, 2, 3, 4)])
    assert lower_bound_bytes(graph, 100, 1) == 0


def test_a_weight_that_several_tasks_read_counts_once() -> None:
    graph = graph_of([(W, 100), (W, 100)], [(0,), (1,), (0,)])
    assert lower_bound_bytes(graph, 100, 1) == 200
    assert lower_bound_bytes(graph, 150, 1) == 100
    assert lower_bound_bytes(graph, 200, 1) == 0


def test_a_large_weight_leaves_little_room_for_others() -> None:
    """Kept bytes a, b, c with b + c <= 50, a + c <= 350, a + b <= 350: at most 375 of 600."""
    graph = graph_of([(W, 400), (W, 100), (W, 100)], [(0,), (1,), (2,)])
    assert lower_bound_bytes(graph, 450, 1) == 225
    assert lower_bound_bytes(graph, 600, 1) == 0


def test_alignment_makes_tasks_larger() -> None:
    graph = graph_of([(W, 100), (W, 100), (A, 1)], [(0,), (1,), (2,)])
    assert lower_bound_bytes(graph, 300, 100) == 0
    assert lower_bound_bytes(graph, 201, 1) == 0
    # One unit of 100 for the activation leaves one for the weights.
    assert lower_bound_bytes(graph, 200, 100) == 100


def test_the_end_of_the_arena_counts_as_a_unit() -> None:
    """An extent may begin in the last unit even if the arena ends inside it."""
    graph = graph_of([(W, 64), (W, 10)], [(0, 1)])
    assert lower_bound_bytes(graph, 74, 64) == 0


def test_no_plan_keeps_nothing() -> None:
    assert lower_bound_bytes(chain_of(3, 100), 99, 1) == 300
    assert lower_bound_bytes(chain_of(3, 100), 0, 1) == 300


def test_more_room_never_raises_the_bound() -> None:
    graph = random_graph(random.Random(3))
    bounds = [lower_bound_bytes(graph, room, 1) for room in range(0, 60)]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[-1] == 0 <= min(bounds)


def with_workspaces(graph: TaskGraph, *sizes: int) -> TaskGraph:
    tasks = zip(graph.tasks, sizes, strict=True)
    return dataclasses.replace(
        graph, tasks=tuple(dataclasses.replace(t, workspace_bytes=n) for t, n in tasks)
    )


@pytest.mark.parametrize(("may_cut", "expected"), [(False, 100), (True, 80)])
def test_a_task_may_take_its_own_workspace_only(may_cut: bool, expected: int) -> None:
    """Beside an arena of 150 bytes there are 40 for the workspace, and one task needs few."""
    bound_of = partial(lower_bound, may_cut=may_cut)
    graph = graph_of([(W, 100), (W, 100), (A, 70)], [(0,), (1,), (2,)])
    of_others = with_workspaces(graph, 40, 40, 0)
    assert bound_of(of_others, 150, 1).nbytes == 120
    # Task 2 has 190 bytes, less its activation. A plan of whole weights needs 100 for each task.
    assert bound_of(of_others, 150, 1, own_workspaces=True).nbytes == expected
    of_the_task = with_workspaces(graph, 0, 0, 40)
    assert bound_of(of_the_task, 150, 1, own_workspaces=True).nbytes == 120


def test_rows_that_each_call_brings_in_are_never_kept() -> None:
    graph = gather_rows(matmul_chain([16, 16], num_rows=2))
    rows = 2 * 16 * 4
    assert lower_bound_bytes(graph, 10**6, 1) == rows
    assert lower_bound_bytes(graph, 10**6, 1, may_cut=True) == rows


def tied() -> TaskGraph:
    """Look two rows up in a table of 100, then multiply by the whole table."""
    graph = matmul_chain([16, 100], num_rows=2, vocabulary=100)
    table, weight = (b.id for b in graph.buffers if b.kind is W)
    product = graph.tasks[-1]
    reads = tuple(sorted({*product.reads} - {weight} | {table}))
    return dataclasses.replace(
        graph, tasks=(*graph.tasks[:-1], dataclasses.replace(product, reads=reads))
    )


def test_rows_that_a_call_brings_in_are_not_cut() -> None:
    graph = gather_rows(matmul_chain([16, 16], num_rows=2))
    needed = [b.id for b in graph.buffers if b.kind is A or b.gather is not None]
    most = max(sum(graph.buffers[b].nbytes for b in t.buffers if b in needed) for t in graph.tasks)
    assert any(graph.buffers[b].gather is not None for b in needed)
    assert lower_bound(graph, 4096, 1, may_cut=True).kept_bytes == 4096 - most


def test_a_table_that_is_kept_needs_no_rows() -> None:
    table, result, rows = 100 * 16 * 4, 2 * 16 * 4, 2 * 16 * 4
    assert lower_bound_bytes(tied(), table + result, 1, may_cut=True) == 0
    assert lower_bound_bytes(tied(), table + result - 10, 1, may_cut=True) == 10
    # A table in which tasks look rows up and no more is worth as much as the rows.
    alone = matmul_chain([16, 16], num_rows=2, vocabulary=100)
    product = 16 * 16 * 4
    assert lower_bound_bytes(alone, product + result, 1, may_cut=True) == rows
    assert lower_bound_bytes(alone, product + table // 2 + result, 1, may_cut=True) == rows // 2
    assert lower_bound_bytes(alone, product + table + result, 1, may_cut=True) == 0


# --- time -----------------------------------------------------------------------------------


def test_a_pass_takes_as_long_as_its_tasks_and_as_its_reloads() -> None:
    bound = lower_bound(chain_of(4, 100), 100, 1, may_cut=False)
    assert bound.nbytes == 400
    assert bound.time_ns([30, 30, 30, 30], 4e9) == 120
    assert bound.time_ns([30, 30, 30, 30], 2e9) == 200


EXPERTS = layers_of_experts(num_layers=2, num_experts=8, rows=2)
"""A layer is: dense product, router, two products of experts. One more task ends the pass."""
ALL_EXPERTS = 2 * 2 * 8 * 64 * 64 * 4
DENSE = 2 * 64 * 64 * 4
KEEPS_DENSE = DENSE + 2 * 512 + 32  # and the activations of a product of experts
OUTSIDE = [1000, 1000, 1, 1, 1000, 1000, 1, 1, 1000]


def test_no_task_runs_between_a_router_and_the_experts_that_it_chooses() -> None:
    """The second product of a layer is outside: the window ends when it begins."""
    bound = lower_bound(EXPERTS, KEEPS_DENSE, 1, may_cut=True)
    assert bound.kept_bytes == DENSE
    outside = sum(OUTSIDE) - 2
    # Ahead, all experts take 20,000 ns on the link; behind, the chosen quarter takes 5,000 ns more
    # than the tasks outside. Best is to bring some of them in ahead, until both sides are equal.
    rate = 1e9 * ALL_EXPERTS / 20_000
    assert bound.time_ns(OUTSIDE, rate) == int(0.75 * outside + 5000) > sum(OUTSIDE)
    # On a fast link the tasks alone take longer, on a slow one the chosen experts.
    assert bound.time_ns(OUTSIDE, 1000 * rate) == sum(OUTSIDE)
    assert bound.time_ns(OUTSIDE, rate / 1000) == int(0.75 * outside + 5_000_000)


def test_experts_of_some_layers_may_come_ahead_and_others_behind() -> None:
    """To bring in half of 4 experts is hardly worth the wait; 2 of 16 are."""
    graph = layers_of_experts(num_experts=(4, 16), rows=2)
    bound = lower_bound(graph, KEEPS_DENSE + 32, 1, may_cut=True)
    assert bound.kept_bytes == DENSE
    few, many = (2 * n * 64 * 64 * 4 for n in (4, 16))
    # With an eighth of the weight on the link, a byte of either layer costs an eighth.
    rate = 1e9 * (few + many) / 8 / 1250
    outside = sum(OUTSIDE) - 2
    assert bound.time_ns(OUTSIDE, rate) == int(7 / 8 * outside + 1250) > sum(OUTSIDE)


def test_tasks_of_a_window_run_beside_its_reloads() -> None:
    bound = lower_bound(EXPERTS, KEEPS_DENSE, 1, may_cut=True)
    inside = [0, 0, 1000, 0, 0, 0, 1000, 0, 0]
    rate = 1e9 * ALL_EXPERTS / 4000
    assert bound.time_ns(inside, rate) == 2000


def test_a_task_that_may_be_delayed_into_a_window_does_not_wait() -> None:
    """Nothing needs the result of the first task before the end."""
    late = Task(0, "mask", writes=(len(EXPERTS.buffers),))
    reads_it = dataclasses.replace(
        EXPERTS.tasks[-1], index=len(EXPERTS.tasks), reads=(*EXPERTS.tasks[-1].reads, *late.writes)
    )
    rest = [dataclasses.replace(t, index=t.index + 1) for t in EXPERTS.tasks[:-1]]
    graph = dataclasses.replace(
        EXPERTS,
        buffers=(*EXPERTS.buffers, Buffer(len(EXPERTS.buffers), A, 64)),
        tasks=(late, *rest, reads_it),
    )
    rate = 1e9 * ALL_EXPERTS / 20_000
    bounds = [
        lower_bound(g, KEEPS_DENSE + 64, 1, may_cut=True).time_ns(times, rate)
        for g, times in ((EXPERTS, OUTSIDE), (graph, [3000, *OUTSIDE]))
    ]
    assert bounds[0] == bounds[1] > sum(OUTSIDE) + 3000


def test_kept_experts_cost_no_time() -> None:
    bound = lower_bound(EXPERTS, 10**7, 1, may_cut=True)
    assert bound.nbytes == 0 and bound.time_ns(OUTSIDE, 1.0) == sum(OUTSIDE)


# --- against all schedules -------------------------------------------------------------------


def random_graph(draw: random.Random) -> TaskGraph:
    num_weights, num_activations = draw.randint(1, 4), draw.randint(0, 2)
    sizes = [(W, draw.randint(0, 9)) for _ in range(num_weights)]
    sizes += [(A, draw.randint(0, 9)) for _ in range(num_activations)]
    tasks = [
        tuple(draw.sample(range(len(sizes)), draw.randint(0, min(3, len(sizes)))))
        for _ in range(draw.randint(1, 6))
    ]
    return graph_of(sizes, tasks)


@pytest.mark.parametrize("seed", range(60))
def test_no_schedule_is_below_the_bound(seed: int) -> None:
    graph = random_graph(random.Random(seed))
    for arena_bytes in range(0, 40, 3):
        fewest = fewest_moved_bytes(graph, arena_bytes, counts_offloads=False)
        bound = lower_bound_bytes(graph, arena_bytes, 1)
        assert bound >= 0
        assert fewest is None or bound <= fewest


def test_the_bound_is_reached_where_bytes_divide() -> None:
    """Where the published optimum for equal pages is a whole number, the best schedule meets it."""
    for room in (1, 4):
        graph = chain_of(4, 12)
        assert fewest_moved_bytes(graph, room * 12) == lower_bound_bytes(graph, room * 12, 1)
