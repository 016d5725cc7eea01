"""A plan's forecast is what the simulator says of the written plan, to the nanosecond."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.taskgraph import JOIN, TO_HOST, Buffer, BufferKind, Task, TaskGraph
from ds_finepage.planning.finepage.choices import Chooser
from ds_finepage.planning.finepage.forecast import Forecaster
from ds_finepage.planning.finepage.held_rows import ways_to_hold
from ds_finepage.planning.finepage.residency import RingShape, WeightClasses
from ds_finepage.planning.finepage.ring import place_activations
from ds_finepage.planning.finepage.streaming import plan_streaming
from ds_finepage.planning.layout import top_of
from ds_finepage.planning.liveness import ample_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.embeddings import gather_rows
from ds_finepage.planning.rewrite.host_products import with_host_rows
from ds_finepage.planning.rewrite.split import divisible_weights
from ds_finepage.planning.simulator import predicted_ns
from tests.property.experts import layers_of_experts
from tests.property.matmul_chains import random_chain
from tests.property.strategies import taskgraphs
from tests.property.test_memgraphs import modest
from tests.unit.planning.finepage.test_packed_weights import layers
from tests.unit.planning.sketches import sketch

ALIGNMENT = 64


def machine(rng: random.Random) -> HardwareProfile:
    """Draw a machine on which now the host, now a link and now the device is the slowest."""
    return HardwareProfile(
        name="drawn",
        source="test",
        capacity_bytes=2**30,
        h2d_bytes_per_s=rng.choice([1e8, 1e9, 1e10]),
        d2h_bytes_per_s=rng.choice([1e7, 1e9]),
        memory_bytes_per_s=1e12,
        flops_per_s={"default": 1e9},
        launch_ns=rng.choice([0, 100, 5000]),
        transfer_latency_ns=rng.choice([0, 1000, 6000]),
        host_op_ns=rng.choice([0, 200, 3000]),
        host_copy_ns=rng.choice([0, 300, 5000]),
        host_bytes_per_s=rng.choice([1e8, 1e10]),
        host_flops_per_s=rng.choice([1e8, 1e9]),
    )


def copying(graph: TaskGraph, rng: random.Random) -> TaskGraph:
    """Let some tasks be followed by a copy to host memory of an activation that is complete."""
    buffers, tasks = list(graph.buffers), list[Task]()
    pending: set[int] = set()
    for task in graph.tasks:
        tasks.append(dataclasses.replace(task, index=len(tasks)))
        pending |= set(task.touches)
        made = task.reads if task.op == JOIN else task.writes
        pending -= set(task.reads) if task.op == JOIN else set()
        for buffer in made:
            is_activation = graph.buffers[buffer].kind is BufferKind.ACTIVATION
            if is_activation and buffer not in pending and rng.random() < 0.5:
                rows = Buffer(len(buffers), BufferKind.HOST, graph.buffers[buffer].nbytes, "rows")
                buffers.append(rows)
                copy = Task(len(tasks), TO_HOST, reads=(buffer,), writes=(rows.id,))
                tasks.append(copy)
    return dataclasses.replace(graph, buffers=tuple(buffers), tasks=tuple(tasks))


def hosting(graph: TaskGraph, rng: random.Random) -> TaskGraph:
    """Let the host compute some products, whole or in part."""
    units = divisible_weights(graph)
    rows = {u.buffer: rng.choice([0, rng.randint(1, u.num_rows), u.num_rows]) for u in units}
    return with_host_rows(graph, units, rows)


def shapes(weights: WeightClasses, room: int, rng: random.Random) -> Iterator[RingShape]:
    """Yield the rings that a search tries, and others."""
    yield from weights.ring_shapes(room)
    for _ in range(3):
        length = rng.randrange(64, max(128, room)) // 64 * 64
        yield RingShape(length, max(64, length // rng.choice([1, 2, 4])))


def forecasts(graph: TaskGraph, rng: random.Random, profile: HardwareProfile | None = None) -> int:
    """Compare all forecasts of a pass with written plans; return how many there were."""
    arena_bytes = rng.randint(64, ample_arena_bytes(graph, ALIGNMENT) + 64)
    problem = Problem(graph, arena_bytes, ALIGNMENT, profile or machine(rng), split=True)
    num_found = 0
    for may_split in (True, False):
        weights = WeightClasses.of(problem, may_split=may_split)
        for held in ways_to_hold(problem):
            placed = place_activations(problem, held)
            room = arena_bytes - top_of(placed)
            for ring in shapes(weights, room, rng):
                choice = Chooser(weights).choose(room, ring)
                if choice is None:
                    continue
                written = plan_streaming(problem, choice, placed, ring.nbytes)
                found = Forecaster(problem, placed).forecast(choice, ring.nbytes, lambda: None)
                if written is None or found is None:
                    assert written is found is None
                    continue
                assert problem.profile is not None
                total_ns = predicted_ns(written, problem.profile)
                assert (found.total_ns, found.moved_bytes) == (total_ns, written.reloaded_bytes)
                assert written.offloaded_bytes == 0
                num_found += 1
    return num_found


@pytest.mark.parametrize("seed", range(60))
def test_chains_of_products_are_forecast(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_chain(rng)
    if rng.random() < 0.5:
        graph = gather_rows(graph)
    if rng.random() < 0.7:
        graph = copying(graph, rng)
    forecasts(graph, rng)


@pytest.mark.parametrize("seed", range(40))
def test_products_of_the_host_are_forecast(seed: int) -> None:
    rng = random.Random(seed)
    graph = hosting(gather_rows(random_chain(rng)), rng)
    forecasts(copying(graph, rng) if rng.random() < 0.5 else graph, rng)


def test_most_of_these_chains_stream() -> None:
    assert sum(forecasts(random_chain(random.Random(s)), random.Random(s)) for s in range(20)) > 50


@pytest.mark.parametrize("seed", range(4))
def test_packed_weights_are_forecast(seed: int) -> None:
    assert sum(forecasts(layers(6), random.Random(4 * seed + k)) for k in range(4)) > 0


@pytest.mark.parametrize("seed", range(4))
def test_slices_of_experts_are_forecast(seed: int) -> None:
    graph = layers_of_experts(rows=512, num_experts=4)  # a pass uses all of them
    rngs = [random.Random(8 * seed + k) for k in range(8)]
    assert sum(forecasts(graph, rng) for rng in rngs) > 0


@modest
@given(graph=taskgraphs(), seed=st.integers(0, 2**16), copies=st.booleans())
def test_odd_passes_are_forecast(graph: TaskGraph, seed: int, copies: bool) -> None:
    rng = random.Random(seed)
    forecasts(copying(graph, rng) if copies else graph, rng)


def test_a_task_that_overwrites_what_a_copy_reads_waits_for_it() -> None:
    graph = sketch("w0:64 a0:64 h:64", "w0 -> a0", "a0 -> h", "a0 -> a0", "a0 ->")
    tasks = [dataclasses.replace(t, op=TO_HOST) if t.index == 1 else t for t in graph.tasks]
    graph = dataclasses.replace(graph, tasks=tuple(tasks))
    profile = dataclasses.replace(machine(random.Random(0)), d2h_bytes_per_s=1e7, launch_ns=100)
    assert sum(forecasts(graph, random.Random(seed), profile) for seed in range(8)) > 0
