"""Keep some weights for good, and run the two-horizon simulation for the rest.

The part of policy ``finepage`` for small arenas, where activations and streamed weights have to
share bytes: the kept weights lie at the upper end, and everything else goes through the lower end
by the published algorithm, streamed weights being dropped after their last use of the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from ds_finepage.graph.memgraph import Extent, MemGraph, Residency
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.horizon import HorizonPlanner, PinnedTooMuch
from ds_finepage.planning.liveness import aligned, uses

STREAM_FACTORS = (1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
"""Sizes of the lower end to try, in units of the least that every task can run in."""


FIXED_SHARE = 0.001
"""Weights below this share of the largest (norms, biases) are kept without asking."""


def weights_by_first_use(graph: TaskGraph, *, handed: bool = False) -> list[int]:
    """List the weights that can be kept and are used, in the order of their first use.

    The rows of an embedding are others in each call, so they cannot; nor can what the call hands
    over from host memory, which is listed too if ``handed`` is true.
    """
    found = uses(graph)
    used = [
        b.id
        for b in graph.buffers
        if b.kind is BufferKind.WEIGHT
        and found[b.id]
        and (b.gather is None or (handed and graph.is_handed(b)))
    ]
    return sorted(used, key=lambda b: (found[b][0], b))


def candidates(
    graph: TaskGraph, weights: list[int], arena_bytes: int, alignment: int
) -> list[frozenset[int]]:
    """List sets of weights to keep, without repeats, in a fixed order."""
    sizes = {b: aligned(graph.buffers[b].nbytes, alignment) for b in weights}
    times_used = {b: len(found) for b, found in enumerate(uses(graph)) if b in sizes}
    found: dict[frozenset[int], None] = {frozenset(weights): None}
    # A weight that is larger than the rest makes the lower end large for everybody, so it may pay
    # to keep just these; a weight that is used twice may have to be reloaded twice.
    for limit in sorted(set(sizes.values()), reverse=True)[:4]:
        always = [b for b in weights if sizes[b] > limit or times_used[b] > 1]
        rest = [b for b in weights if b not in set(always)]
        least = least_lower_bytes(graph, set(always), alignment)
        for factor in STREAM_FACTORS:
            room = arena_bytes - int(least * factor) - sum(sizes[b] for b in always)
            if room >= 0:
                found[frozenset(always) | spread(rest, sizes, room)] = None
    found[frozenset()] = None
    return list(found)


def least_lower_bytes(graph: TaskGraph, kept: Set[int], alignment: int) -> int:
    """Count the bytes of the largest working set, without the weights that are kept."""
    return max(
        sum(aligned(graph.buffers[b].nbytes, alignment) for b in graph.paged(task) if b not in kept)
        for task in graph.tasks
    )


def spread(weights: list[int], sizes: dict[int, int], room: int) -> frozenset[int]:
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


def plan_keeping(
    graph: TaskGraph,
    weights: list[int],
    kept: Mapping[int, Extent],
    arena_bytes: int,
    alignment: int,
) -> MemGraph | None:
    """Plan with some weights kept for good; None where they leave too little room.

    Args:
        graph: The pass.
        weights: Those that may be kept, as :func:`weights_by_first_use` lists them.
        kept: Those that are, and where they lie.
        arena_bytes: Size of the arena.
        alignment: Of extents, in bytes.
    """
    if any(extent.offset < 0 for extent in kept.values()):
        return None
    planner = HorizonPlanner(
        graph,
        arena_bytes=arena_bytes,
        alignment=alignment,
        policy="finepage",
        entry=tuple(Residency(b, e) for b, e in sorted(kept.items())),
        streamed=frozenset(weights) - kept.keys(),
        pinned=frozenset(kept),
    )
    try:
        return planner.plan_working_set()
    except PinnedTooMuch:
        return None
