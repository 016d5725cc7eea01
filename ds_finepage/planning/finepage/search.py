"""Policy ``finepage``: plan for the pass that comes again.

Decode repeats one graph, so a steady pass reloads exactly the bytes that are not kept from one pass
to the next. A part of the weights is kept for good, the rest streams through a ring; exit residency
equals entry residency.

The choice of the kept bytes hardly changes the number of reloaded bytes, but it decides the time.
Reloads that are spread evenly hide behind compute; a resident head with a streamed tail does not.
With ``split`` every weight that can be cut keeps the same share of its rows. Without it, whole
weights are chosen evenly over the pass. Small slices cost more copies and tasks than they are worth
where weights are small, or where little streams. So the search also tries to stream a few large
pieces (``grains``), and whole weights beside cut ones.

The candidates, in their order:

1. Everything stays, if all weights fit.
2. Cut weights stream through a ring (``streaming``, ``residency``).
3. Whole weights do. If no ring has room, the two-horizon simulation makes the plan
   (``small_arena``).

Each is scored by its predicted time and its bytes (``best_plans``). A good one ends its list. If
none is good, the list is tried for the pass in which cheap tasks make masks and the like again
instead of holding them (``recompute``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.finepage.best_plans import BestPlans
from ds_finepage.planning.finepage.forecast import Plan
from ds_finepage.planning.finepage.held_rows import ways_to_hold
from ds_finepage.planning.finepage.residency import WeightClasses
from ds_finepage.planning.finepage.ring import place_activations
from ds_finepage.planning.finepage.small_arena import plans_without_ring
from ds_finepage.planning.finepage.streaming import streaming_plans
from ds_finepage.planning.layout import top_of
from ds_finepage.planning.liveness import min_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.embeddings import gather_rows, tables_to_leave
from ds_finepage.planning.rewrite.exact_slices import (
    exact_units,
    least_sliced_bytes,
    slices_that_fit,
)
from ds_finepage.planning.rewrite.recompute import recompute
from ds_finepage.planning.rewrite.split import divisible_weights


def plan_finepage(problem: Problem) -> MemGraph:
    """Plan a cyclic pass: the fastest plan, and among equally fast ones the one with fewest bytes.

    Args:
        problem: The pass and its arena. With ``split``, matrix products are cut along their output
            features, and embedding tables are replaced by looked-up rows. With ``shared``, these
            residents are left in place as far as there is room, and nothing else is kept.

    Returns:
        The plan. Its taskgraph differs from the problem's if weights are cut or cheap tasks run
        again.

    Raises:
        PlanInfeasibleError: Some task's working set is larger than the arena.
    """
    problem = dataclasses.replace(problem, entry=())  # a cyclic pass begins as it ends
    if problem.shared:
        plans = BestPlans(problem)
        _offer(plans, problem, _plans_beside)
        if plans.best is not None:
            return plans.best
        problem = dataclasses.replace(problem, shared=())
    plans, has_ring = BestPlans(problem), True
    if problem.split:
        has_ring = _offer(plans, problem, _plans_that_cut)
    if not plans.tried:
        problem = _in_exact_slices(problem)
        problem.require_feasible()
        plans = BestPlans(problem)
    # Beside packed products of the host nothing is left to cut, so whole weights were tried.
    is_whole = has_ring and problem.graph.host_tasks and not divisible_weights(problem.graph)
    may_differ = not (plans.has_fastest or is_whole) and _looking_rows_up(problem).is_feasible
    if not plans.tried or may_differ:
        _offer(plans, problem, partial(_plans_of_whole_weights, has_ring=has_ring))
    assert plans.best is not None, "keeping nothing is always possible"
    return plans.best


def _in_exact_slices(problem: Problem) -> Problem:
    """Return a problem with short slices if whole weights have no room; then slices stay whole."""
    rows = _looking_rows_up(problem).graph
    if not problem.split or problem.is_feasible or not exact_units(rows):
        return problem
    return problem.of(slices_that_fit(rows, problem.arena_bytes, problem.alignment))


Candidates = Callable[[BestPlans, Problem], Iterator[Plan | None]]
"""Yields plans of a pass; it sees what became of those before."""


def _offer(plans: BestPlans, problem: Problem, candidates: Candidates) -> bool:
    """Offer plans of the pass as it is and, if none is good, with cheap tasks run again.

    Returns:
        Whether the pass as it is has a plan.
    """
    plans.offer_all(candidates(plans, problem))
    has_plan = bool(plans.tried)
    if not plans.moves_nothing and not plans.has_good:
        again = recompute(problem.graph, alignment=problem.alignment)
        if again is not problem.graph:
            plans.offer_all(candidates(plans, problem.of(again)))
    return has_plan


def _plans_that_cut(plans: BestPlans, problem: Problem) -> Iterator[Plan | None]:
    """Yield plans that cut weights, unless all weights fit as they are."""
    room = problem.arena_bytes - top_of(place_activations(problem))
    if WeightClasses.of(problem, may_split=False).missing_bytes(room) <= 0:
        yield from _plans_with_ring(plans, problem, may_split=False)
    if not plans.moves_nothing:
        yield from _plans_with_ring(plans, _looking_rows_up(problem), may_split=True)


def _plans_of_whole_weights(
    plans: BestPlans, problem: Problem, *, has_ring: bool
) -> Iterator[Plan | None]:
    """Yield plans of whole weights: by a ring, or else without one."""
    kept = tables_to_leave(problem.graph, problem.arena_bytes) if problem.split else frozenset()
    whole = _looking_rows_up(problem, kept)
    yield from _plans_with_ring(plans, whole, may_split=False)
    # Without a machine bytes alone count, and the published algorithm may move fewer.
    if not has_ring or not plans.tried or problem.profile is None:
        yield from plans_without_ring(whole)


def _plans_beside(plans: BestPlans, problem: Problem) -> Iterator[Plan | None]:
    """Yield plans that keep shared residents, and nothing else."""
    yield from _plans_with_ring(plans, _looking_rows_up(problem), may_split=problem.split)


def _plans_with_ring(
    plans: BestPlans, problem: Problem, *, may_split: bool
) -> Iterator[Plan | None]:
    for held in ways_to_hold(problem):
        yield from streaming_plans(problem, may_split=may_split, may_win=plans.may_win, held=held)
        if plans.has_good:
            return


def _looking_rows_up(problem: Problem, kept: frozenset[int] = frozenset()) -> Problem:
    """Return the pass in which looked-up rows take the place of embedding tables, with split."""
    if not problem.split:
        return problem
    return problem.of(gather_rows(problem.graph, kept=kept))


def min_split_arena_bytes(graph: TaskGraph, alignment: int) -> int:
    """Return the smallest arena in which ``finepage`` finds a plan that may cut weights.

    Args:
        graph: The pass.
        alignment: Of extents, in bytes.
    """
    least, rows = min_arena_bytes(graph, alignment), gather_rows(graph)
    if exact_units(rows):
        least = min(least, least_sliced_bytes(rows, alignment))
    for candidate in (graph, recompute(graph, alignment)):
        problem = Problem(gather_rows(candidate), 0, alignment)
        weights = WeightClasses.of(problem, may_split=True)
        ring_bytes = weights.least_ring_bytes() if weights.order else 0
        least = min(least, top_of(place_activations(problem)) + weights.fixed_bytes + ring_bytes)
    return least
