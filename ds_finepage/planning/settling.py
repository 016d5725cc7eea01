"""Plans a pass again on what it leaves, until that is what it finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.planning.problem import Problem


def settle(plan: Callable[[Problem], MemGraph], problem: Problem, rounds: int) -> MemGraph:
    """Plan a pass for the residency that its predecessor leaves.

    Args:
        plan: Plans one pass.
        problem: The first pass.
        rounds: Most passes to plan after the first.

    Returns:
        The first plan that leaves what it finds; the last plan if there is none.
    """
    found = plan(problem)
    for _ in range(rounds):
        if is_settled(found):
            break
        found = plan(dataclasses.replace(problem, entry=found.exit))
    return found


def is_settled(plan: MemGraph) -> bool:
    """Tell whether a pass leaves the residency that it finds."""
    return set(plan.entry) == set(plan.exit)
