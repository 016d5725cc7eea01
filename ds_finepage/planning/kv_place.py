"""Chooses the place of a pass's KV cache: the one in which the plan takes least time.

A cache on the device takes room from the weights, which are then reloaded. A cache in host memory
is reloaded itself, and its new rows are written there. Either can be the faster place.

A plan of a large model takes a second, so a place is not planned if a lower bound of its time tells
enough. The place with the least bound is planned first, for its plan rules the other one out most
often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.pipeline import (
    Planned,
    PlanSettings,
    bound_of,
    collector_off,
    plan_checked,
)
from ds_finepage.planning.time_bound import least_time_ns

MIN_GAIN = 0.001
"""The share of a pass's time that a later place must save at least, by its bound, to be planned.
An earlier place needs fewer copies, and policy ``finepage`` pays for traffic with no less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPlace:
    """The plan of a pass in the place that was chosen.

    Attributes:
        index: The place.
        planned: The plan.
        other_ns: Of each other place, the time of its plan; if none was made, its least time. None
            if the policy has no plan for it.
    """

    index: int
    planned: Planned
    other_ns: tuple[int | None, ...]


def plan_fastest(places: Sequence[tuple[TaskGraph, int]], settings: PlanSettings) -> PlannedPlace:
    """Plan a pass in the place of its KV cache that takes least time; of equal ones, the first.

    Args:
        places: Of each place, the captured pass and the size of its arena; one or two.
        settings: How to plan.

    Raises:
        ConfigError: Unknown policy.
        PlanInfeasibleError: The policy has no plan for any place; the error is that of the first.
        InvalidPlanError: A plan breaks a rule, which is a fault of the planner.
    """
    with collector_off():
        if len(places) == 1:
            planned = plan_checked(*places[0], settings)
            return PlannedPlace(index=0, planned=planned, other_ns=())
        return _faster(places, settings)


def _faster(places: Sequence[tuple[TaskGraph, int]], settings: PlanSettings) -> PlannedPlace:
    least_ns = [_least_ns(*place, settings) for place in places]
    first = int(least_ns[1] < least_ns[0] * (1 - MIN_GAIN))
    times_ns: list[int | None] = [*least_ns]
    plans: dict[int, Planned] = {}
    refusals: dict[int, PlanInfeasibleError] = {}
    for at in (first, 1 - first):
        for found in plans.values():
            most_ns = found.timeline.total_ns * (1 - MIN_GAIN if at else 1)
            if least_ns[at] > most_ns:  # the plan of the other place is as good
                return PlannedPlace(index=1 - at, planned=found, other_ns=(least_ns[at],))
        try:
            plans[at] = plan_checked(*places[at], settings)
            times_ns[at] = plans[at].timeline.total_ns
        except PlanInfeasibleError as error:
            refusals[at], times_ns[at] = error, None
    if not plans:
        raise refusals[0]
    best = min(plans, key=lambda at: (plans[at].timeline.total_ns, at))
    return PlannedPlace(index=best, planned=plans[best], other_ns=(times_ns[1 - best],))


def _least_ns(graph: TaskGraph, arena_bytes: int, settings: PlanSettings) -> int:
    """Return a time that no plan of a pass beats."""
    bound = bound_of(graph, arena_bytes, settings)
    return least_time_ns(bound, settings.profile, arena_bytes + bound.graph.workspace_bytes)
