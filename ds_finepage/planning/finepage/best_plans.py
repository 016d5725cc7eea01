"""Scores the plans of a search by their time and their bytes, and remembers the best."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.planning.bounds import LowerBound, lower_bound
from ds_finepage.planning.finepage.forecast import Forecast, Plan
from ds_finepage.planning.finepage.held_rows import copies_to_host
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.late_experts import wait_for_routes
from ds_finepage.planning.time_bound import least_time_ns
from ds_finepage.units import NS_PER_S

GOOD_ENOUGH = 1.02
"""A plan within this factor of the lower bound of time ends the search for plans of other kinds."""

EQUAL_TIMES = 1.005
"""Times within this factor of the least are equal, and fewer bytes decide. A plan within this
factor of the bound makes whole weights needless where weights can be cut. With few bytes, it ends a
list of candidates."""

FEW_BYTES = 1.02
"""As many bytes are few, in units of the lower bound of bytes."""


class BestPlans:
    """The plans that are as fast as the fastest. Each moves fewer bytes than every faster one.

    Attributes:
        tried: The plans, fewest bytes first. Without a machine, bytes stand for time.
        has_good: One of all plans is close to the lower bound of time.
        has_fastest: Hardly any other can be faster.
    """

    def __init__(self, problem: Problem) -> None:
        """Start without a plan for the pass as it was captured."""
        self.tried: list[Forecast] = []
        self.has_good = self.has_fastest = False
        self._problem = problem

    # The bounds: no plan moves fewer bytes or takes less time.

    @cached_property
    def lower(self) -> LowerBound:
        """The lower bound of bytes."""
        problem = self._problem
        return lower_bound(
            problem.graph, problem.arena_bytes, problem.alignment, may_cut=problem.split
        )

    @property
    def few_bytes(self) -> float:
        """As many bytes are few for a rank to move; each reloads its part of a weight."""
        return FEW_BYTES * self.lower.nbytes / self._problem.graph.num_ranks

    @cached_property
    def least_ns(self) -> int:
        """The time of the tasks alone, or of the fewest bytes if that is longer."""
        problem = self._problem
        if problem.profile is None:
            return 0
        return least_time_ns(self.lower, problem.profile, problem.arena_bytes)

    @property
    def fastest_ns(self) -> int:
        """The least time of all plans."""
        return self.tried[-1].total_ns

    @property
    def best(self) -> MemGraph | None:
        """The plan with the fewest bytes; None if there is no plan."""
        return self.tried[0].plan if self.tried else None

    @property
    def moves_nothing(self) -> bool:
        """True if the best plan moves nothing, and waits for no copy of a task's results."""
        if not self.tried or self.tried[0].moved_bytes > 0:
            return False
        return self.has_fastest or not copies_to_host(self._problem.graph)

    @property
    def is_done(self) -> bool:
        """True if no other plan is faster than the best, or moves clearly fewer bytes.

        Without a profile, and beside shared residents, every good plan is the last.
        """
        if not self.has_good or self._problem.profile is None or self._problem.shared:
            return self.has_good
        best, equal_ns = self.tried[0], EQUAL_TIMES * self.least_ns
        return best.total_ns <= equal_ns and best.moved_bytes <= self.few_bytes

    def may_win(self, moved: int, num_copies: int) -> bool:
        """Tell whether a plan that moves at least so much can be better than the best.

        It has fewer bytes and is as fast as the fastest, or it is so fast that the best is not.

        Args:
            moved: Bytes, those of all ranks together.
            num_copies: Copies.
        """
        profile = self._problem.profile
        if profile is None or not self.tried:
            return True
        best = self.tried[0]
        num_ranks = self._problem.graph.num_ranks
        has_fewer = moved < num_ranks * best.moved_bytes
        limit_ns = EQUAL_TIMES * self.fastest_ns if has_fewer else best.total_ns / EQUAL_TIMES
        latencies_ns = num_copies * profile.transfer_latency_ns
        rate = profile.h2d_bytes_per_s * num_ranks
        return moved * NS_PER_S <= (limit_ns - latencies_ns) * rate

    def offer_all(self, plans: Iterable[Plan | None]) -> None:
        """Offer plans until no other can be better."""
        for plan in plans:
            self.offer(plan)
            if self.is_done:
                break

    def offer(self, plan: Plan | None) -> None:
        """Take a plan, or the same plan with delayed experts, if it is one of the best so far."""
        if plan is None:
            return
        if isinstance(plan, Forecast):
            self._add(plan, self.least_ns)
            return
        late = wait_for_routes(plan)
        self._predict(late)
        # Reloads ahead of the router copy all experts, which alone may take longer.
        if late is not plan and self.may_win(plan.reloaded_bytes + plan.offloaded_bytes, 0):
            self._predict(plan)

    def _predict(self, plan: MemGraph) -> None:
        """Predict the time of a plan that is written, and take it if it is as fast."""
        moved, profile = plan.reloaded_bytes + plan.offloaded_bytes, self._problem.profile
        bound_ns = self.least_ns
        if profile is not None and self._problem.shared:
            # No plan comes near the bound of a pass that is alone.
            bound_ns = max(bound_ns, int(moved * NS_PER_S / profile.h2d_bytes_per_s))
        self._add(Forecast(self._problem.cost_of(plan), moved, lambda: plan), bound_ns)

    def _add(self, plan: Forecast, bound_ns: int) -> None:
        """Hold a plan against the bound; take it unless another one is as good or clearly faster.

        No other plan can be faster than ``bound_ns``.
        """
        self.has_good = self.has_good or plan.total_ns <= GOOD_ENOUGH * bound_ns
        self.has_fastest = self.has_fastest or plan.total_ns <= EQUAL_TIMES * bound_ns
        tried = sorted([*self.tried, plan], key=lambda found: (found.moved_bytes, found.total_ns))
        most_ns = EQUAL_TIMES * min(found.total_ns for found in tried)
        self.tried = []
        for found in tried:
            if found.total_ns <= most_ns and not (self.tried and self.fastest_ns <= found.total_ns):
                self.tried.append(found)
