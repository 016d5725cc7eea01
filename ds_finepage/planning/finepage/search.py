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
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.bounds import LowerBound, lower_bound
from ds_finepage.planning.finepage.exact import is_tiny, plan_exact
from ds_finepage.planning.finepage.forecast import KNOWS_WARM, Forecast, Plan, moved_bytes, written
from ds_finepage.planning.finepage.held_rows import copies_to_host, lengths_of_holding
from ds_finepage.planning.finepage.options import DEFAULTS, FinepageOptions
from ds_finepage.planning.finepage.residency import WeightClasses
from ds_finepage.planning.finepage.ring import place_activations
from ds_finepage.planning.finepage.small_arena import (
    keeping_plans,
    settled_plan,
    shared_keeping_plans,
)
from ds_finepage.planning.finepage.streaming import resident_plans, streaming_plans
from ds_finepage.planning.layout import top_of
from ds_finepage.planning.liveness import min_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.embeddings import gather_rows, looked_up_bytes
from ds_finepage.planning.rewrite.exact_slices import slices_that_fit, smallest_slices
from ds_finepage.planning.rewrite.late_experts import wait_for_routes
from ds_finepage.planning.rewrite.recompute import recompute
from ds_finepage.planning.simulator import predicted_ns
from ds_finepage.planning.time_bound import least_time_ns


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
        rows = problem.of(gather_rows(problem.graph)) if problem.split else problem
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
    rows = gather_rows(problem.graph)
    if smallest_slices(rows) is rows:
        return problem
    return problem.of(slices_that_fit(rows, problem.arena_bytes, problem.alignment))


class _Front:
    """The fastest plans. Each moves fewer bytes than every faster one.

    Attributes:
        plans: Moved bytes, time and plan; fewest bytes first.
    """

    def __init__(self, equal_times: float) -> None:
        self.plans: list[tuple[int, int, Plan]] = []
        self._equal_times = equal_times

    @property
    def fastest_ns(self) -> int:
        return min(total_ns for _, total_ns, _ in self.plans)

    @property
    def fewest_bytes(self) -> int:
        return self.plans[0][0]

    def add(self, moved: int, total_ns: int, plan: Plan) -> None:
        """Compare by time; times that are nearly the least are equal, and fewer bytes decide."""
        tried = sorted([*self.plans, (moved, total_ns, plan)], key=lambda t: t[:2])
        most_ns = self._equal_times * min(t[1] for t in tried)
        self.plans = []
        for candidate in tried:
            if candidate[1] <= most_ns and (not self.plans or candidate[1] < self.plans[-1][1]):
                self.plans.append(candidate)


class _Search:
    """Tries plans and remembers the best.

    Attributes:
        has_good: One of the plans is close to the lower bound of time.
        has_fastest: Hardly any other can be faster.
    """

    def __init__(self, problem: Problem, options: FinepageOptions = DEFAULTS) -> None:
        self._problem, self._options = problem, options
        self._front = _Front(options.equal_times)
        self.has_good = self.has_fastest = self._left_out = False

    @property
    def has_plan(self) -> bool:
        return bool(self._front.plans)

    @property
    def best(self) -> MemGraph | None:
        return written(self._front.plans[0][-1]) if self.has_plan else None

    def moves_nothing(self) -> bool:
        """Tell whether the best plan moves nothing, and waits for no copy of a task's results."""
        if not self.has_plan or self._front.fewest_bytes > 0:
            return False
        return self.has_fastest or not copies_to_host(self._problem.graph)

    # The score.

    @cached_property
    def _bound(self) -> LowerBound:
        problem = self._problem
        return lower_bound(
            problem.graph, problem.arena_bytes, problem.alignment, may_cut=problem.split
        )

    @property
    def _few_bytes(self) -> float:
        """As many bytes are few for a rank to move; each reloads its part of a weight."""
        return self._options.few_bytes * self._bound.nbytes / self._problem.graph.num_ranks

    @cached_property
    def _bound_ns(self) -> int:
        """The time of the tasks alone, or of the fewest bytes if that is longer."""
        problem = self._problem
        assert problem.profile is not None
        return least_time_ns(
            self._bound, problem.profile, problem.arena_bytes, knows_warm=KNOWS_WARM
        )

    @property
    def _is_done(self) -> bool:
        """True if no other plan is faster than the best, or moves clearly fewer bytes.

        Without a profile, and beside shared residents, every good plan is the last.
        """
        if self._problem.profile is None or self._problem.shared:
            return True
        moved, total_ns, _ = self._front.plans[0]
        if total_ns > self._options.equal_times * self._bound_ns:
            return False
        return moved <= self._few_bytes

    def offer(self, plan: Plan | None) -> bool:
        """Take a plan, or the same plan with delayed experts, if it is the best so far.

        Returns:
            Whether it is close to the lower bound of time.
        """
        if plan is None:
            return False
        if isinstance(plan, Forecast) or not self._options.delays_experts:
            return self._offer(plan)
        late = wait_for_routes(plan)
        is_good = late is not plan and self._offer(late)
        return self._offer(plan) or is_good

    def _offer(self, plan: Plan) -> bool:
        moved, profile = moved_bytes(plan), self._problem.profile
        if profile is None:
            total_ns, is_good = 0, moved == 0
            self.has_fastest = self.has_fastest or is_good
        else:
            if isinstance(plan, Forecast):
                total_ns, bound_ns = plan.total_ns, self._bound_ns
            else:
                total_ns, alone_ns = predicted_ns(plan, profile, knows_warm=KNOWS_WARM)
                # Beside shared residents no plan comes near the bound of a pass that is alone.
                bound_ns = alone_ns if self._problem.shared else self._bound_ns
            is_good = total_ns <= self._options.good_enough * bound_ns
            if total_ns <= self._options.fast_enough * bound_ns:
                self.has_fastest = True
            if not self._problem.shared and moved > self._few_bytes:
                # A little time is not worth that much traffic.
                total_ns = int(total_ns * self._options.fast_enough)
        self._front.add(moved, total_ns, plan)
        self.has_good = self.has_good or is_good
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
        limit_ns = self._options.equal_times * self._front.fastest_ns
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
        again = recompute(
            problem.graph,
            problem.alignment,
            problem.profile if has_room else None,
            tiny_share=self._options.fixed_share,
        )
        if again is not problem.graph and not (has_room and self._hardly_helps(again)):
            attempt(problem.of(again))
        return has_room

    def _hardly_helps(self, graph: TaskGraph) -> bool:
        """Tell whether the room that another graph gains is too small to change the time."""
        before, after = (
            top_of(place_activations(self._problem.of(g))) for g in (self._problem.graph, graph)
        )
        return before - after <= (self._options.fast_enough - 1) * self._front.fewest_bytes

    # The candidates.

    def try_cutting(self, problem: Problem) -> bool:
        """Offer plans that cut weights, unless all weights fit as they are."""
        self.try_plans(resident_plans(problem, self._options))
        if self.moves_nothing():
            return True
        rows = problem.of(gather_rows(problem.graph))
        return self.try_plans(self._streaming_plans(rows, may_split=True))[0]

    def try_whole(self, problem: Problem) -> bool:
        """Offer plans of whole weights: by a ring, then by keeping sets, then by trying all."""
        captured = problem
        if problem.split:
            # Where no whole table fits beside its task, all tables give way to their rows.
            problem = problem.of(gather_rows(problem.graph, whole_tables=problem.is_feasible))
        has_room, is_good = self.try_plans(self._streaming_plans(problem, may_split=False))
        self._try_tables(captured)
        is_short = self._is_short(problem.graph)
        if not self.has_plan or (is_short and not is_good and not self.moves_nothing()):
            for plan in keeping_plans(problem, self._options):
                self.offer(plan)
                if self.moves_nothing():
                    break
            if is_short and not self.moves_nothing():
                self.offer(settled_plan(problem, self._options))
        if self._options.tries_exact and is_tiny(problem.graph) and not self.moves_nothing():
            self.offer(plan_exact(problem))
        return has_room

    def _try_tables(self, problem: Problem) -> None:
        """Offer plans of whole weights that keep embedding tables: no task waits for their rows."""
        for kept in self._tables_to_keep(problem):
            graph = gather_rows(problem.graph, kept=kept)
            self.try_plans(self._streaming_plans(problem.of(graph), may_split=False))

    def _tables_to_keep(self, problem: Problem) -> Iterator[frozenset[int]]:
        """Yield sets of tables, if copies of their rows take a share of a short pass that counts.

        To keep a table costs more bytes, and in a long pass more time to plan.
        """
        profile, rows = problem.profile, looked_up_bytes(problem.graph)
        if profile is None or not (rows and self.has_plan and self._is_short(problem.graph)):
            return
        if self._bound.nbytes > self._options.nearly_full * problem.graph.weight_bytes:
            return
        largest = max(rows, key=problem.size)
        for kept in (frozenset(rows), frozenset(rows) - {largest}):
            rows_ns = len(kept) * profile.transfer_latency_ns
            rows_ns += sum(rows[b] for b in kept) * 10**9 // int(profile.h2d_bytes_per_s)
            if rows_ns > (self._options.fast_enough - 1) * self._front.fastest_ns:
                yield kept

    def try_shared(self, problem: Problem) -> bool:
        """Offer plans that keep shared residents, and nothing else."""
        split = problem.split
        if split:
            problem = problem.of(gather_rows(problem.graph))
        has_room, is_good = self.try_plans(self._streaming_plans(problem, may_split=split))
        if not (is_good or split) and self._is_short(problem.graph):
            for plan in shared_keeping_plans(problem, self._options):
                self.offer(plan)
        return has_room

    def _streaming_plans(self, problem: Problem, *, may_split: bool) -> Iterator[Plan | None]:
        lengths = self._options.held_copies
        if not self._is_short(problem.graph):  # its plans take long to make
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

    def _is_short(self, graph: TaskGraph) -> bool:
        return len(graph.tasks) <= self._options.max_tasks_for_horizon


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
