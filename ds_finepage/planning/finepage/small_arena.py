"""Plans by the two-horizon simulation, for arenas that are too small for a ring.

Activations and streamed weights have to share bytes there. The published algorithm lets them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ds_finepage.graph.memgraph import Extent, MemGraph, Residency
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.horizon import HorizonPlanner
from ds_finepage.planning.problem import Problem

SETTLING_ROUNDS = 4
"""Passes to plan by the published algorithm until one leaves what it finds."""


def weights_by_first_use(graph: TaskGraph) -> list[int]:
    """List the used weights that can be kept, in the order of their first use.

    The rows of an embedding differ in each call, so they cannot be kept.
    """
    found = graph.uses
    used = [b.id for b in graph.buffers if graph.can_be_kept(b) and found[b.id]]
    return sorted(used, key=lambda b: (found[b][0], b))


def plans_without_ring(problem: Problem) -> Iterator[MemGraph | None]:
    """Yield the plan that keeps no weight, and plans that leave what they find, if there are any.

    One of these begins with an empty arena, and one with as many weights as it holds.
    """
    weights = weights_by_first_use(problem.graph)
    nothing = HorizonPlanner(problem, policy="finepage", streamed=frozenset(weights))
    yield nothing.plan_working_set()
    sizes, left = problem.sizes(weights), problem.top
    full = []
    for buffer in weights:
        if sizes[buffer] <= left:
            left -= sizes[buffer]
            full.append(Residency(buffer, Extent(left, sizes[buffer])))
    for entry in ((), tuple(full)):
        yield settled_plan(dataclasses.replace(problem, entry=entry))


def settled_plan(problem: Problem) -> MemGraph | None:
    """Return the plan by the published algorithm that leaves what it finds, if one comes soon."""
    for _ in range(SETTLING_ROUNDS):
        found = HorizonPlanner(problem, policy="finepage").plan_working_set()
        if set(found.entry) == set(found.exit):
            return found
        problem = dataclasses.replace(problem, entry=found.exit)
    return None
