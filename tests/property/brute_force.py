"""The fewest bytes that any steady schedule of a tiny taskgraph moves, by trying them all.

Generous to the optimum: a schedule need not find contiguous bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, combinations

from ds_finepage.graph.taskgraph import Buffer, BufferKind, Task, TaskGraph


def subsets(items: frozenset[int]) -> Iterator[frozenset[int]]:
    ordered = sorted(items)
    every = chain.from_iterable(combinations(ordered, n) for n in range(len(ordered) + 1))
    return map(frozenset, every)


def fewest_moved_bytes(
    graph: TaskGraph, arena_bytes: int, *, counts_offloads: bool = True
) -> int | None:
    """Return the fewest bytes reloaded plus offloaded in a pass that ends as it began.

    Sizes count as they are. None where some task does not fit.
    """
    used = frozenset(
        b for t in graph.tasks for b in t.reads if graph.buffers[b].kind is BufferKind.WEIGHT
    )
    best = None
    for entry in subsets(used):
        if _sum(graph, entry) > arena_bytes:
            continue
        found = _fewest_from(graph, arena_bytes, entry, counts_offloads)
        if found is not None and (best is None or found < best):
            best = found
    return best


def _fewest_from(
    graph: TaskGraph, arena_bytes: int, entry: frozenset[int], counts_offloads: bool
) -> int | None:
    last_use = {b: t.index for t in graph.tasks for b in t.buffers}
    reached = {entry: 0}  # residency before a task -> fewest bytes moved to get there
    for task in graph.tasks:
        named = frozenset(graph.paged(task))
        following: dict[frozenset[int], int] = {}
        for resident, moved in reached.items():
            missing = named.intersection(task.reads) - resident
            moved += _sum(graph, missing)
            for kept in subsets(resident - named):
                if _sum(graph, kept | named) > arena_bytes:
                    continue
                # What is alive and clean nowhere else has to be written out before it goes.
                gone = resident - named - kept
                written = {b for b in gone if graph.buffers[b].kind is BufferKind.ACTIVATION}
                after = frozenset(
                    b
                    for b in kept | named
                    if graph.buffers[b].kind is BufferKind.WEIGHT or last_use[b] > task.index
                )
                cost = moved + counts_offloads * _sum(graph, written)
                following[after] = min(cost, following.get(after, cost))
        reached = following
    costs = [moved for resident, moved in reached.items() if resident >= entry]
    return min(costs, default=None)


def _sum(graph: TaskGraph, buffers: frozenset[int] | set[int]) -> int:
    return sum(graph.buffers[b].nbytes for b in buffers)


def tiny_graph(rng: random.Random) -> TaskGraph:
    """Draw a taskgraph of up to 8 tasks; sizes are multiples of 64."""
    num_tasks = rng.randint(1, 8)
    buffers: list[Buffer] = []
    tasks = []

    def make(kind: BufferKind) -> int:
        buffers.append(Buffer(len(buffers), kind, 64 * rng.randint(1, 4), f"b{len(buffers)}"))
        return len(buffers) - 1

    weights = [make(BufferKind.WEIGHT) for _ in range(rng.randint(1, 6))]
    activations: list[int] = []
    for index in range(num_tasks):
        reads = set(rng.sample(weights, rng.randint(0, min(2, len(weights)))))
        if activations:
            reads.add(activations[-1])
            if rng.random() < 0.3:
                reads.add(rng.choice(activations))
        made = make(BufferKind.ACTIVATION)
        activations.append(made)
        tasks.append(Task(index, "op", f"t{index}", reads=tuple(sorted(reads)), writes=(made,)))
    return TaskGraph("tiny", tuple(buffers), (), tuple(tasks))
