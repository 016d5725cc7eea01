"""Policy ``finepage``: plan for the pass that comes again.

Decode repeats one graph, so a steady pass reloads exactly the bytes that are not kept from one pass
to the next. A part of the weights is kept for good, the rest streams through a ring; exit residency
equals entry residency.

The choice of the kept bytes hardly changes the number of reloaded bytes, but it decides the time.
Reloads that are spread evenly hide behind compute; a resident head with a streamed tail does not.
With ``split`` every weight that can be cut keeps the same share of its rows. Without it, whole
weights are chosen evenly over the pass. The search tries several lengths of the ring: a short ring
keeps more, a long one looks farther ahead. Small slices cost more copies and tasks than they are
worth where weights are small, or where little streams. So the search also tries to stream a few
large pieces (``grains``), and whole weights beside cut ones.

If not all weights fit, the search also tries the pass in which cheap tasks make masks and the like
again instead of holding them (``recompute``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.finepage.best_plans import BestPlans, SearchBounds
from ds_finepage.planning.finepage.exact import is_tiny, plan_exact
from ds_finepage.planning.finepage.forecast import (
    Forecast,
    Plan,
    moved_bytes,
    written,
)
from ds_finepage.planning.finepage.held_rows import copies_to_host, lengths_of_holding
from ds_finepage.planning.finepage.options import DEFAULTS, FinepageOptions
from ds_finepage.planning.finepage.residency import WeightClasses
from ds_finepage.planning.finepage.ring import place_activations
from ds_finepage.planning.finepage.small_arena import (
    keeping_plans,
    settling_plans,
    shared_keeping_plans,
)
from ds_finepage.planning.finepage.streaming import resident_plans, streaming_plans
from ds_finepage.planning.finepage.tables import tables_to_keep
from ds_finepage.planning.layout import top_of
from ds_finepage.planning.liveness import min_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.embeddings import gather_rows
from ds_finepage.planning.rewrite.exact_slices import slices_that_fit, smallest_slices
from ds_finepage.planning.rewrite.late_experts import wait_for_routes
from ds_finepage.planning.rewrite.recompute import recompute
from ds_finepage.planning.simulator import predicted_ns

PlansOf = Callable[[Problem, FinepageOptions], Iterator[MemGraph | None]]


def plan_finepage(problem: Problem, options: FinepageOptions = DEFAULTS) -> MemGraph:
    """Plan a cyclic pass: the fastest plan, and among equally fast ones the one with fewest bytes.

    Args:
        problem: The pass and its arena. With ``split``, matrix products are cut along their output
            features, and embedding tables are replaced by looked-up rows. With ``shared``, these
            residents are left in place as far as there is room, and nothing else is kept.
        options: The heuristics.

    Returns:
        The plan. Its taskgraph differs from the problem's if weights are cut or cheap tasks run
        again.

    Raises:
        PlanInfeasibleError: Some task's working set is larger than the arena.
    """
    problem = dataclasses.replace(problem, entry=())  # a cyclic pass begins as it ends
    if problem.shared:
        beside = _Search(problem, options)
        beside.try_both_graphs(beside.try_shared)
        if (found := beside.best) is not None:
            return found
        problem = dataclasses.replace(problem, shared=())
    search = _Search(problem, options)
    has_room = problem.split and search.try_both_graphs(search.try_cutting)
    if not search.has_plan:
        problem = _in_exact_slices(problem)
        problem.require_feasible()
        search = _Search(problem, options)
    if not (has_room and (search.has_fastest or not options.tries_whole)):
        rows = _with_rows(problem) if problem.split else problem
        if not search.has_plan or rows.is_feasible:
            search.try_both_graphs(search.try_whole)
    best = search.best
    assert best is not None, "keeping nothing is always possible"
    return best


def _in_exact_slices(problem: Problem) -> Problem:
    """Return a problem with short slices if whole weights have no room; then slices stay whole.

    A ring of slices may need more than each task by itself.
    """
    if not problem.split or problem.is_feasible:
        return problem
    rows = _with_rows(problem).graph
    if smallest_slices(rows) is rows:
        return problem
    return problem.of(slices_that_fit(rows, problem.arena_bytes, problem.alignment))


class _Search:
    """Tries plans and remembers the best.

    Attributes:
        has_good: One of the plans is close to the lower bound of time.
        has_fastest: Hardly any other can be faster.
    """

    def __init__(self, problem: Problem, options: FinepageOptions = DEFAULTS) -> None:
        if _is_thorough(problem, options):
            options = options.of_thorough_searches()
        self._problem, self._options = problem, options
        self._bounds, self._plans = SearchBounds(problem, options), BestPlans(options)
        self.has_good = self.has_fastest = self._left_out = False

    @property
    def has_plan(self) -> bool:
        return bool(self._plans.tried)

    @property
    def best(self) -> MemGraph | None:
        return written(self._plans.best.plan) if self.has_plan else None

    def moves_nothing(self) -> bool:
        """Tell whether the best plan moves nothing, and waits for no copy of a task's results."""
        if not self.has_plan or self._plans.best.moved_bytes > 0:
            return False
        return self.has_fastest or not copies_to_host(self._problem.graph)

    # The score.

    @property
    def _is_done(self) -> bool:
        """True if no other plan is faster than the best, or moves clearly fewer bytes.

        Without a profile, and beside shared residents, every good plan is the last.
        """
        if self._problem.profile is None or self._problem.shared:
            return True
        best = self._plans.best
        is_fast = best.total_ns <= self._options.equal_times * self._bounds.least_ns
        return is_fast and best.moved_bytes <= self._bounds.few_bytes

    def offer(self, plan: Plan | None) -> bool:
        """Take a plan, or the same plan with delayed experts, if it is the best so far.

        Returns:
            Whether it is close to the lower bound of time.
        """
        if plan is None:
            return False
        if isinstance(plan, Forecast) or not self._options.delays_experts:
            return self._offer(plan)
        if (late := wait_for_routes(plan)) is plan:
            return self._offer(plan)
        is_good = self._offer(late)
        # Reloads ahead of the router copy all experts, which alone may take longer.
        return (self._may_win(moved_bytes(plan), 0) and self._offer(plan)) or is_good

    def _offer(self, plan: Plan) -> bool:
        moved, profile = moved_bytes(plan), self._problem.profile
        if profile is None:
            total_ns, is_good = 0, moved == 0
            self.has_good = self.has_fastest = self.has_fastest or is_good
        else:
            if isinstance(plan, Forecast):
                total_ns, bound_ns = plan.total_ns, self._bounds.least_ns
            else:
                total_ns, alone_ns = predicted_ns(plan, profile)
                # Beside shared residents no plan comes near the bound of a pass that is alone.
                bound_ns = alone_ns if self._problem.shared else self._bounds.least_ns
            is_good = total_ns <= self._options.good_enough * bound_ns
            if total_ns <= self._options.fast_enough * bound_ns:
                self.has_fastest = True
            if total_ns <= self._options.ends_search * bound_ns:
                self.has_good = True
        self._plans.add(moved, total_ns, plan)
        return is_good

    def _may_win(self, moved: int, num_copies: int) -> bool:
        """Tell whether a plan that moves at least so much can be as fast as the fastest.

        Args:
            moved: Bytes, those of all ranks together.
            num_copies: Copies.
        """
        profile = self._problem.profile
        if profile is None or not self.has_plan:
            return True
        limit_ns = self._options.equal_times * self._plans.fastest_ns
        latencies_ns = num_copies * profile.transfer_latency_ns
        rate = profile.h2d_bytes_per_s * self._problem.graph.num_ranks
        if moved * 10**9 <= (limit_ns - latencies_ns) * rate:
            return True
        self._left_out = True
        return False

    # The loop.

    def try_plans(self, plans: Iterable[Plan | None]) -> tuple[bool, bool]:
        """Offer plans until one is good enough, and no other can be better.

        Returns:
            Whether there was any plan, and whether one was good enough.
        """
        has_room = is_good = self._left_out = False
        for plan in plans:
            has_room = has_room or plan is not None
            is_good = self.offer(plan) or is_good
            if is_good and self._is_done:
                break
        return has_room or self._left_out, is_good

    def try_both_graphs(self, attempt: Callable[[Problem], bool]) -> bool:
        """Try the pass as it is and, if something moves, with cheap tasks run again.

        Args:
            attempt: Offers plans for a graph; returns whether weights can stream through it.

        Returns:
            The result of ``attempt`` for the pass as it is.
        """
        problem = self._problem
        has_room = attempt(problem)
        if self.moves_nothing() or self.has_good or not self._options.recomputes:
            return has_room
        # If activations leave no room for a ring, room counts more than time.
        again = problem.once(
            ("recompute", has_room),
            partial(
                recompute,
                alignment=problem.alignment,
                profile=problem.profile if has_room else None,
                tiny_share=self._options.fixed_share,
            ),
        )
        if again is problem.graph:
            return has_room
        share = self._options.fast_enough - 1  # less room hardly changes the time
        if not has_room or _gained_bytes(problem, again) > share * self._plans.best.moved_bytes:
            attempt(problem.of(again))
        return has_room

    # The candidates.

    def try_cutting(self, problem: Problem) -> bool:
        """Offer plans that cut weights, unless all weights fit as they are."""
        self.try_plans(resident_plans(problem, self._options))
        if self.moves_nothing():
            return True
        rows = _with_rows(problem)
        return self.try_plans(self._streaming_plans(rows, may_split=True))[0]

    def try_whole(self, problem: Problem) -> bool:
        """Offer plans of whole weights: by a ring, then by keeping sets, then by trying all."""
        captured, problem = problem, _of_whole_weights(problem)
        has_room, is_good = self.try_plans(self._streaming_plans(problem, may_split=False))
        self._try_tables(captured)
        if not self.has_plan or (_is_short(problem.graph, self._options) and not is_good):
            self._try_simulation(problem)
        if self._options.tries_exact and is_tiny(problem.graph) and not self.moves_nothing():
            self.offer(plan_exact(problem))
        return has_room

    def _try_simulation(self, problem: Problem) -> None:
        """Offer plans of whole weights by the two-horizon simulation."""
        if self._options.tries_sets or not self.has_plan:
            self._try_simulated(problem, keeping_plans)
        if self._options.settles and _is_short(problem.graph, self._options):
            self._try_simulated(problem, settling_plans)

    def _try_simulated(self, problem: Problem, plans: PlansOf) -> None:
        """Offer plans until one moves nothing."""
        for plan in plans(problem, self._options):
            if self.moves_nothing():
                return
            self.offer(plan)

    def _try_tables(self, problem: Problem) -> None:
        """Offer plans of whole weights that keep embedding tables: no task waits for their rows."""
        if not self.has_plan or not _is_short(problem.graph, self._options):
            return
        if self._bounds.lower.nbytes > self._options.nearly_full * problem.graph.weight_bytes:
            return
        worth_ns = (self._options.fast_enough - 1) * self._plans.fastest_ns
        for kept in tables_to_keep(problem, worth_ns):
            rows = _with_rows(problem, kept=kept)
            self.try_plans(self._streaming_plans(rows, may_split=False))

    def try_shared(self, problem: Problem) -> bool:
        """Offer plans that keep shared residents, and nothing else."""
        split = problem.split
        if split:
            problem = _with_rows(problem)
        has_room, is_good = self.try_plans(self._streaming_plans(problem, may_split=split))
        if not (is_good or split) and _is_short(problem.graph, self._options):
            for plan in shared_keeping_plans(problem, self._options):
                self.offer(plan)
        return has_room

    def _streaming_plans(self, problem: Problem, *, may_split: bool) -> Iterator[Plan | None]:
        lengths = self._options.held_copies
        if not _is_short(problem.graph, self._options):
            lengths = lengths[-1:]
        for held in lengths_of_holding(problem, lengths):
            yield from streaming_plans(
                problem,
                may_split=may_split,
                options=self._options,
                may_win=self._may_win,
                held=held,
            )
            if self.has_good:
                return


def _gained_bytes(problem: Problem, graph: TaskGraph) -> int:
    """Return the room for weights that another graph of a pass gains."""
    before, after = (top_of(place_activations(problem.of(g))) for g in (problem.graph, graph))
    return before - after


def _of_whole_weights(problem: Problem) -> Problem:
    """Return the pass as plans of whole weights take it."""
    if not problem.split:
        return problem
    # Where no whole table fits beside its task, all tables give way to their rows.
    return _with_rows(problem, whole_tables=problem.is_feasible)


def _with_rows(
    problem: Problem, *, whole_tables: bool = False, kept: Set[int] = frozenset()
) -> Problem:
    """Return the pass in which the rows that a call looks up take the place of embedding tables."""
    key = ("rows", whole_tables, frozenset(kept))
    rows = problem.once(key, partial(gather_rows, whole_tables=whole_tables, kept=kept))
    return problem.of(rows)


def _is_thorough(problem: Problem, options: FinepageOptions) -> bool:
    """Tell whether a search looks for the last thousandth: its plans take little time to make."""
    if problem.shared or problem.profile is None:
        return False
    return _is_short(problem.graph, options)


def _is_short(graph: TaskGraph, options: FinepageOptions) -> bool:
    """Tell whether plans of a pass take little time to make."""
    return len(graph.tasks) <= options.most_tasks_of_short


def min_split_arena_bytes(
    graph: TaskGraph, alignment: int, options: FinepageOptions = DEFAULTS
) -> int:
    """Return the smallest arena in which ``finepage`` finds a plan that may cut weights.

    Args:
        graph: The pass.
        alignment: Of extents, in bytes.
        options: The heuristics.
    """
    least, rows = min_arena_bytes(graph, alignment), gather_rows(graph)
    exact = smallest_slices(rows)
    if exact is not rows:
        least = min(least, min_arena_bytes(exact, alignment))
    graphs = [graph]
    if options.recomputes:
        graphs.append(recompute(graph, alignment, tiny_share=options.fixed_share))
    for candidate in graphs:
        problem = Problem(gather_rows(candidate), 0, alignment)
        weights = WeightClasses.of(problem, may_split=True, options=options)
        ring_bytes = weights.least_ring_bytes() if weights.order else 0
        least = min(least, top_of(place_activations(problem)) + weights.fixed_bytes + ring_bytes)
    return least
