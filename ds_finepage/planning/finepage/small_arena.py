"""Keeps some weights for good, and runs the two-horizon simulation for the rest.

Policy ``finepage`` uses this for small arenas, where activations and streamed weights have to share
bytes. The kept weights lie at the upper end. Everything else goes through the lower region by the
published algorithm, which drops a streamed weight after its last use in the pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Set

from ds_finepage.graph.memgraph import Extent, MemGraph, Residency
from ds_finepage.graph.routes import packed_experts
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.finepage.stacking import spread_order, stack_down
from ds_finepage.planning.horizon import HorizonPlanner, PinnedTooMuch
from ds_finepage.planning.problem import Problem

SETTLING_ROUNDS = 4
"""Passes to plan by the published algorithm until one leaves what it finds."""

LOWER_FACTORS = (1.0, 1.5, 3.0)
"""Sizes of the lower region, in units of the smallest in which every task can run."""


def weights_by_first_use(graph: TaskGraph, *, per_call: bool = False) -> list[int]:
    """List the used weights that can be kept, in the order of their first use.

    The rows of an embedding differ in each call, so they cannot be kept. Weights that each call
    brings from host memory cannot either; they are listed if ``per_call`` is true.
    """
    found = graph.uses
    used = [
        b.id
        for b in graph.buffers
        if b.kind is BufferKind.WEIGHT
        and found[b.id]
        and (b.gather is None or (per_call and graph.is_handed(b)))
    ]
    return sorted(used, key=lambda b: (found[b][0], b))


def keeping_plans(problem: Problem) -> Iterator[MemGraph | None]:
    """Yield plans that keep sets of whole weights; None for a set that leaves too little room."""
    for chosen in sets_to_keep(problem):
        yield _plan_stacked(problem, chosen)


def settled_plan(problem: Problem) -> MemGraph | None:
    """Return the plan by the published algorithm that leaves what it finds, if one comes soon."""
    for _ in range(SETTLING_ROUNDS):
        found = HorizonPlanner(problem, policy="finepage").plan_working_set()
        if set(found.entry) == set(found.exit):
            return found
        problem = dataclasses.replace(problem, entry=found.exit)
    return None


def _plan_stacked(problem: Problem, kept: Set[int]) -> MemGraph | None:
    """Plan with some weights kept at the upper end, evenly spread; None if they have no room."""
    weights = weights_by_first_use(problem.graph)
    order = spread_order([b for b in weights if b in kept])
    return plan_keeping(problem, stack_down(order, problem.sizes(weights), problem.top))


def shared_keeping_plans(problem: Problem) -> Iterator[MemGraph | None]:
    """Yield plans that keep just shared residents, all of them first; None as above."""
    graph = problem.graph
    mine = {graph.buffers[b].key: b for b in weights_by_first_use(graph)}
    at = {mine[s.buffer.key]: s.extent for s in problem.shared if s.buffer.key in mine}
    least = least_lower_bytes(problem, at.keys())
    tried = set()
    for lower_bytes in (0, *(int(least * factor) for factor in LOWER_FACTORS)):
        kept = {b: e for b, e in at.items() if e.offset >= lower_bytes}
        if frozenset(kept) not in tried:
            tried.add(frozenset(kept))
            yield plan_keeping(problem, kept)


def sets_to_keep(problem: Problem) -> list[frozenset[int]]:
    """List sets of weights to keep, without repeats, in a fixed order."""
    weights = weights_by_first_use(problem.graph)
    sizes = problem.sizes(weights)
    times_used = {b: len(found) for b, found in enumerate(problem.graph.uses) if b in sizes}
    found: dict[frozenset[int], None] = {frozenset(weights): None}
    chosen = packed_experts(problem.graph)
    # A weight that is larger than the others needs a large lower region if it streams, so it may
    # pay to keep just these. A weight that is used twice may have to be reloaded twice.
    for limit in sorted(set(sizes.values()), reverse=True)[:2]:
        always = [b for b in weights if sizes[b] > limit or times_used[b] > 1]
        rest = [b for b in weights if b not in set(always)]
        least = least_lower_bytes(problem, set(always))
        for factor in LOWER_FACTORS:
            room = problem.arena_bytes - int(least * factor) - sum(sizes[b] for b in always)
            if room >= 0:
                found[frozenset(always) | spread(rest, sizes, room)] = None
            if room >= 0 and chosen:  # to keep a byte of an expert saves a share of a byte
                whole = spread([b for b in rest if b not in chosen], sizes, room)
                left = room - sum(sizes[b] for b in whole)
                few = spread([b for b in rest if b in chosen], sizes, left)
                found[frozenset(always) | whole | few] = None
    found[frozenset()] = None
    return list(found)


def least_lower_bytes(problem: Problem, kept: Set[int]) -> int:
    """Return the bytes of the largest working set, without the weights that are kept."""
    graph = problem.graph
    return max(
        sum(problem.size(b) for b in graph.paged(task) if b not in kept) for task in graph.tasks
    )


def spread(weights: list[int], sizes: dict[int, int], room: int) -> frozenset[int]:
    """Choose weights evenly over the order in which they are used.

    Args:
        weights: The weights, in that order.
        sizes: Bytes of each.
        room: Most bytes to choose.
    """
    total = sum(sizes[b] for b in weights)
    if total <= room:
        return frozenset(weights)
    kept: list[int] = []
    left, due = room, 0
    for buffer in weights:
        due += sizes[buffer] * room  # in units of 1/total bytes, to stay with integers
        if due * 2 >= sizes[buffer] * total and sizes[buffer] <= left:
            kept.append(buffer)
            left -= sizes[buffer]
            due -= sizes[buffer] * total
    chosen = set(kept)
    for buffer in sorted(weights, key=lambda b: (-sizes[b], b)):
        if buffer not in chosen and sizes[buffer] <= left:
            chosen.add(buffer)
            left -= sizes[buffer]
    return frozenset(chosen)


def plan_keeping(problem: Problem, kept: Mapping[int, Extent]) -> MemGraph | None:
    """Plan with some weights kept for good.

    Args:
        problem: The pass and its arena.
        kept: The kept weights, with their extents.

    Returns:
        None if the kept weights leave too little room.
    """
    if any(extent.offset < 0 for extent in kept.values()):
        return None
    entry = tuple(Residency(b, e) for b, e in sorted(kept.items()))
    planner = HorizonPlanner(
        dataclasses.replace(problem, entry=entry),
        policy="finepage",
        streamed=frozenset(weights_by_first_use(problem.graph)) - kept.keys(),
        pinned=frozenset(kept),
    )
    try:
        return planner.plan_working_set()
    except PinnedTooMuch:
        return None
