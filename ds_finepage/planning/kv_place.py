"""Chooses the place of a pass's KV cache: the one in which the plan takes least time.

A cache on the device takes room from the weights, which are then reloaded. A cache in host memory
is reloaded itself, and its new rows are written there. Either can be the faster place.

A plan of a large model takes a second, so a place is not planned if a lower bound of its time tells
enough. The place with the least bound is planned first, for its plan rules the other one out most
often.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        places: Of each place, the captured pass and the size of its arena.
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
        return _fastest(places, settings)


def _fastest(places: Sequence[tuple[TaskGraph, int]], settings: PlanSettings) -> PlannedPlace:
    least_ns = [_least_ns(*place, settings) for place in places]
    times_ns: list[int | None] = [*least_ns]
    plans: dict[int, Planned] = {}
    refusals: dict[int, PlanInfeasibleError] = {}
    for at in _in_turn(least_ns):
        if any(_is_ruled_out(at, least_ns[at], i, plans[i].timeline.total_ns) for i in plans):
            continue
        try:
            plans[at] = plan_checked(*places[at], settings)
            times_ns[at] = plans[at].timeline.total_ns
        except PlanInfeasibleError as error:
            refusals[at], times_ns[at] = error, None
    if not plans:
        raise refusals[0]
    best = min(plans, key=lambda at: (plans[at].timeline.total_ns, at))
    return PlannedPlace(
        index=best, planned=plans[best], other_ns=(*times_ns[:best], *times_ns[best + 1 :])
    )


def _in_turn(least_ns: Sequence[int]) -> Iterator[int]:
    """Yield places by their least times; one goes ahead of an earlier place for ``MIN_GAIN``."""
    left = list(range(len(least_ns)))
    while left:
        first = left[0]
        for at in left[1:]:
            if least_ns[at] < least_ns[first] * (1 - MIN_GAIN):
                first = at
        left.remove(first)
        yield first


def _is_ruled_out(at: int, least_ns: int, other: int, other_ns: int) -> bool:
    """Tell whether a place need not be planned, because the plan of another one is as good.

    Args:
        at: The place.
        least_ns: Its least time.
        other: The place that has a plan.
        other_ns: The time of that plan.
    """
    return least_ns > other_ns * ((1 - MIN_GAIN) if other < at else 1)


def _least_ns(graph: TaskGraph, arena_bytes: int, settings: PlanSettings) -> int:
    """Return a time that no plan of a pass beats."""
    bound = bound_of(graph, arena_bytes, settings)
    return least_time_ns(bound, settings.profile, arena_bytes + bound.graph.workspace_bytes)
