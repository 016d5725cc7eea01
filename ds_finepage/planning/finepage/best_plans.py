"""The best plans of a search, and the bounds that it holds them against."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from ds_finepage.planning.bounds import LowerBound, lower_bound
from ds_finepage.planning.finepage.forecast import Plan
from ds_finepage.planning.finepage.options import FinepageOptions
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.time_bound import least_time_ns


class Candidate(NamedTuple):
    """A plan, and the figures that it is compared by."""

    moved_bytes: int
    total_ns: int
    plan: Plan


class BestPlans:
    """The plans that are as fast as the fastest. Each moves fewer bytes than every faster one.

    Attributes:
        tried: The plans, fewest bytes first.
    """

    def __init__(self, options: FinepageOptions) -> None:
        """Start without a plan."""
        self.tried: list[Candidate] = []
        self._options = options

    @property
    def fastest_ns(self) -> int:
        """The least time of all plans."""
        return self.tried[-1].total_ns

    @property
    def best(self) -> Candidate:
        """The plan with the fewest bytes."""
        return self.tried[0]

    def add(self, moved_bytes: int, total_ns: int, plan: Plan) -> None:
        """Take a plan, unless another one is as good or clearly faster."""
        tried = sorted(
            [*self.tried, Candidate(moved_bytes, total_ns, plan)], key=lambda found: found[:2]
        )
        most_ns = self._options.equal_times * min(found.total_ns for found in tried)
        self.tried = []
        for found in tried:
            if found.total_ns <= most_ns and not (self.tried and self.fastest_ns <= found.total_ns):
                self.tried.append(found)


class SearchBounds:
    """The bounds of a problem: no plan moves fewer bytes or takes less time."""

    def __init__(self, problem: Problem, options: FinepageOptions) -> None:
        """Compute nothing yet."""
        self._problem, self._options = problem, options

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
        return self._options.few_bytes * self.lower.nbytes / self._problem.graph.num_ranks

    @cached_property
    def least_ns(self) -> int:
        """The time of the tasks alone, or of the fewest bytes if that is longer."""
        problem = self._problem
        assert problem.profile is not None
        return least_time_ns(self.lower, problem.profile, problem.arena_bytes)
