"""Cuts weights where no bit changes: TaskGraph -> TaskGraph.

A product with a packed weight is made in slices that begin at fixed rows, and so is that of the
output layer beside packed weights. A cut between two of them changes no bit, so it needs no leave
of the user, as ``split`` does. More tasks and copies take more time, though. So it is made only if
whole weights have no room.
"""

from __future__ import annotations

from collections.abc import Callable

from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.liveness import extent_bytes, live_activation_bytes, min_arena_bytes
from ds_finepage.planning.rewrite.split import Divisible, cut_weights, divisible_weights

SLICES_IN_ROOM = 4
"""Slices that the arena is to hold beside the activations: one is used while others come."""


def exact_units(graph: TaskGraph) -> list[Divisible]:
    """Find the weights that can be cut where no bit changes; those of several ranks are not cut."""
    if graph.parted:
        return []
    return [d for d in divisible_weights(graph) if d.exact_rows is not None]


def least_sliced_bytes(graph: TaskGraph, alignment: int) -> int:
    """Return the smallest arena in which every task of the smallest slices can run.

    Args:
        graph: The pass, uncut: to cut it takes longer.
        alignment: Of extents, in bytes.
    """
    units, least = {unit.task: unit for unit in exact_units(graph)}, 0
    for task in graph.tasks:
        sizes = {b: graph.buffers[b].nbytes for b in graph.paged(task)}
        unit = units.get(task.index)
        if unit is not None and unit.exact_rows is not None:
            sizes |= {b: unit.exact_rows * row_bytes for b, row_bytes in unit.parts}
        least = max(least, sum(extent_bytes(nbytes, alignment) for nbytes in sizes.values()))
    return least


def smallest_slices(graph: TaskGraph) -> TaskGraph:
    """Cut every weight wherever no bit changes.

    Args:
        graph: The pass.

    Returns:
        The taskgraph; ``graph`` itself if there is nothing to cut.
    """
    return _cut(graph, lambda unit: 1)


def slices_that_fit(graph: TaskGraph, arena_bytes: int, alignment: int) -> TaskGraph:
    """Cut weights where no bit changes, if whole weights have no room.

    Args:
        graph: The pass.
        arena_bytes: Size of the arena.
        alignment: Of extents, in bytes.

    Returns:
        The taskgraph in slices as long as the room allows; ``graph`` itself if all tasks fit as
        they are.
    """
    if min_arena_bytes(graph, alignment) <= arena_bytes:
        return graph
    live = max(live_activation_bytes(graph, alignment), default=0)
    most = (arena_bytes - live) // SLICES_IN_ROOM
    long = _cut(graph, lambda unit: _num_steps(unit, most, alignment))
    fits = min_arena_bytes(long, alignment) <= arena_bytes
    return long if fits else smallest_slices(graph)


def _num_steps(unit: Divisible, most_bytes: int, alignment: int) -> int:
    """Return how many of the shortest slices make one of at most so many bytes, at least one."""
    assert unit.exact_rows is not None
    step = sum(extent_bytes(unit.exact_rows * row, alignment) for _, row in unit.parts)
    return max(1, most_bytes // step)


def _cut(graph: TaskGraph, num_steps: Callable[[Divisible], int]) -> TaskGraph:
    """Cut weights into slices; ``num_steps`` of the shortest ones of a weight stay together."""
    units = exact_units(graph)
    return cut_weights(
        graph,
        {d.buffer: range(0, d.num_rows, (d.exact_rows or 1) * num_steps(d)) for d in units},
    )
