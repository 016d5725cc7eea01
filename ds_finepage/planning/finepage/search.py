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
from ds_finepage.planning.finepage.streaming import resident_plans, streaming_plans
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
        beside = _Search(problem)
        beside.try_both_graphs(beside.try_shared)
        if beside.plans.best is not None:
            return beside.plans.best
        problem = dataclasses.replace(problem, shared=())
    search = _Search(problem)
    if problem.split:
        search.try_both_graphs(search.try_cutting)
    if not search.plans.tried:
        problem = _in_exact_slices(problem)
        problem.require_feasible()
        search = _Search(problem)
    if not search.plans.has_fastest:
        rows = _with_rows(problem) if problem.split else problem
        if not search.plans.tried or rows.is_feasible:
            search.try_both_graphs(search.try_whole)
    best = search.plans.best
    assert best is not None, "keeping nothing is always possible"
    return best


def _in_exact_slices(problem: Problem) -> Problem:
    """Return a problem with short slices if whole weights have no room; then slices stay whole."""
    if not problem.split or problem.is_feasible:
        return problem
    rows = _with_rows(problem).graph
    if not exact_units(rows):
        return problem
    return problem.of(slices_that_fit(rows, problem.arena_bytes, problem.alignment))


class _Search:
    """Offers plans of a pass.

    Attributes:
        plans: The best of them.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.plans = BestPlans(problem)
        self._lacks_ring = False  # with cut weights, in the pass as it is

    def try_both_graphs(self, attempt: Callable[[Problem], None]) -> None:
        """Try the pass as it is and, if no plan is good, with cheap tasks run again."""
        problem = self._problem
        attempt(problem)
        self._lacks_ring = not self.plans.tried
        if self.plans.moves_nothing or self.plans.has_good:
            return
        again = problem.once(("recompute",), partial(recompute, alignment=problem.alignment))
        if again is not problem.graph:
            attempt(problem.of(again))

    def try_cutting(self, problem: Problem) -> None:
        """Offer plans that cut weights, unless all weights fit as they are."""
        self.plans.offer_all(resident_plans(problem))
        if not self.plans.moves_nothing:
            self.plans.offer_all(self._streaming_plans(_with_rows(problem), may_split=True))

    def try_whole(self, problem: Problem) -> None:
        """Offer plans of whole weights: by a ring, or else without one."""
        whole = problem
        if problem.split:
            whole = _with_rows(problem, tables_to_leave(problem.graph, problem.arena_bytes))
        self.plans.offer_all(self._streaming_plans(whole, may_split=False))
        # Without a machine bytes alone count, and the published algorithm may move fewer.
        if self._lacks_ring or not self.plans.tried or problem.profile is None:
            self.plans.offer_all(plans_without_ring(whole))

    def try_shared(self, problem: Problem) -> None:
        """Offer plans that keep shared residents, and nothing else."""
        split = problem.split
        if split:
            problem = _with_rows(problem)
        self.plans.offer_all(self._streaming_plans(problem, may_split=split))

    def _streaming_plans(self, problem: Problem, *, may_split: bool) -> Iterator[Plan | None]:
        for held in ways_to_hold(problem):
            yield from streaming_plans(
                problem,
                may_split=may_split,
                may_win=self.plans.may_win,
                held=held,
            )
            if self.plans.has_good:
                return


def _with_rows(problem: Problem, kept: frozenset[int] = frozenset()) -> Problem:
    """Return the pass in which the rows that a call looks up take the place of embedding tables."""
    return problem.of(problem.once(("rows", kept), partial(gather_rows, kept=kept)))


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
