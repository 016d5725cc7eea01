"""Policy ``finepage``: plan for the pass that comes again (floor 2, no torch).

Decode repeats one graph, so the bytes that a steady pass reloads are the bytes that are not kept
from one pass to the next. A set of weights is therefore kept for good at the upper end of the
arena; the others are streamed through the lower end by the two-horizon simulation and dropped after
their last use of the pass, so that exit residency equals entry residency.

Which weights are kept hardly changes the bytes but decides the time: misses that are spread evenly
hide behind compute, a resident head with a streamed tail does not. How large the streaming region
is, is found by trying: small keeps more, large looks farther ahead.
"""

from __future__ import annotations

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import Extent, MemGraph, Residency
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.horizon import HorizonPlanner, PinnedTooMuch
from ds_finepage.planning.liveness import aligned, require_feasible, uses
from ds_finepage.planning.simulator import simulate

STREAM_FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Sizes of the streaming region to try, in units of the least that every task can run in."""


def plan_finepage(
    graph: TaskGraph,
    *,
    arena_bytes: int,
    alignment: int,
    profile: HardwareProfile | None = None,
) -> MemGraph:
    """Plan a cyclic pass: the fewest bytes, and of several such plans the fastest.

    Args:
        graph: The pass.
        arena_bytes: Size of the arena.
        alignment: Of extents, in bytes.
        profile: Rates to predict the time with. Without one, bytes alone decide.

    Raises:
        PlanInfeasibleError: Some task's working set is larger than the arena.
    """
    require_feasible(graph, arena_bytes, alignment)
    weights = _weights_by_first_use(graph)
    best: tuple[tuple[int, ...], MemGraph] | None = None
    for kept in _candidates(graph, weights, arena_bytes, alignment):
        plan = _plan_keeping(graph, weights, kept, arena_bytes, alignment)
        if plan is None:
            continue
        moved = plan.reloaded_bytes + plan.offloaded_bytes
        cost = (simulate(plan, profile).total_ns, moved) if profile else (moved,)
        if best is None or cost < best[0]:
            best = (cost, plan)
        if moved == 0:
            break
    assert best is not None, "keeping nothing is always possible"
    return best[1]


def _weights_by_first_use(graph: TaskGraph) -> list[int]:
    found = uses(graph)
    used = [b.id for b in graph.buffers if b.kind is BufferKind.WEIGHT and found[b.id]]
    return sorted(used, key=lambda b: (found[b][0], b))


def _candidates(
    graph: TaskGraph, weights: list[int], arena_bytes: int, alignment: int
) -> list[frozenset[int]]:
    """List sets of weights to keep, without repeats, in a fixed order."""
    sizes = {b: aligned(graph.buffers[b].nbytes, alignment) for b in weights}
    times_used = {b: len(found) for b, found in enumerate(uses(graph)) if b in sizes}
    found: dict[frozenset[int], None] = {frozenset(weights): None}
    # A weight that is larger than the rest makes the streaming region large for everybody, so it
    # may pay to keep just these; a weight that is used twice may have to be reloaded twice.
    for limit in sorted({max(sizes.values(), default=0), *sizes.values()}, reverse=True)[:4]:
        always = [b for b in weights if sizes[b] > limit or times_used[b] > 1]
        rest = [b for b in weights if b not in set(always)]
        least = _least_streaming_bytes(graph, set(always), alignment)
        for factor in STREAM_FACTORS:
            room = arena_bytes - int(least * factor) - sum(sizes[b] for b in always)
            if room >= 0:
                found[frozenset(always) | _spread(rest, sizes, room)] = None
    found[frozenset()] = None
    return list(found)


def _least_streaming_bytes(graph: TaskGraph, kept: set[int], alignment: int) -> int:
    """Count the bytes of the largest working set, without the weights that are kept."""
    return max(
        sum(aligned(graph.buffers[b].nbytes, alignment) for b in graph.paged(task) if b not in kept)
        for task in graph.tasks
    )


def _spread(weights: list[int], sizes: dict[int, int], room: int) -> frozenset[int]:
    """Choose weights of at most ``room`` bytes, evenly over the order in which they are used."""
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


def _plan_keeping(
    graph: TaskGraph,
    weights: list[int],
    kept: frozenset[int],
    arena_bytes: int,
    alignment: int,
) -> MemGraph | None:
    """Plan with some weights kept for good; None where they leave too little room."""
    entry, top = [], arena_bytes // alignment * alignment
    for buffer in weights:
        if buffer in kept:
            size = aligned(graph.buffers[buffer].nbytes, alignment)
            top -= size
            entry.append(Residency(buffer, Extent(top, size)))
    if top < 0:
        return None
    planner = HorizonPlanner(
        graph,
        arena_bytes=arena_bytes,
        alignment=alignment,
        policy="finepage",
        entry=tuple(sorted(entry, key=lambda r: r.buffer)),
        streamed=frozenset(weights) - kept,
        pinned=kept,
    )
    try:
        return planner.plan_working_set()
    except PinnedTooMuch:
        return None
