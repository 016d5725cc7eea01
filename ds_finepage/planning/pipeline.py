"""The one road from a captured pass to a checked plan, and the bytes that a pass needs."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from ds_finepage.checker.checker import check
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.graph.timeline import Timeline
from ds_finepage.planning.bounds import LowerBound, lower_bound
from ds_finepage.planning.budget import non_arena_bytes
from ds_finepage.planning.finepage.search import min_split_arena_bytes
from ds_finepage.planning.finepage.stacking import SharedResident
from ds_finepage.planning.host_lane import with_host_lane
from ds_finepage.planning.liveness import min_arena_bytes, needed_arena_bytes, require_feasible
from ds_finepage.planning.policies import (
    EngineSettings,
    policy_named,
    unpacking_that_fits,
)
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.embeddings import gather_rows, tables_to_leave
from ds_finepage.planning.rewrite.exact_slices import least_sliced_bytes, slices_that_fit
from ds_finepage.planning.rewrite.host_products import host_bytes
from ds_finepage.planning.rewrite.unpacking import unpack_by_rows
from ds_finepage.planning.simulator import predicted_ns, simulate
from ds_finepage.planning.time_bound import least_time_beside_host_ns, least_time_ns

MAX_STEADY_ROUNDS = 8
"""Passes to plan before taking a plan whose exit differs from its entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """How to plan.

    Attributes:
        policy: A key of ``POLICIES``.
        split: Plans may cut weights. A policy that cannot cut ignores it, but its plan is still
            held against the lower bound of plans that cut.
        alignment: Of extents, in bytes.
        profile: The machine to plan for.
        engine: Settings that a baseline takes for its system, instead of choosing them.
    """

    policy: str
    split: bool
    alignment: int
    profile: HardwareProfile
    engine: EngineSettings | None = None

    @property
    def cuts_weights(self) -> bool:
        """True if plans may cut weights and the policy can."""
        return self.split and policy_named(self.policy).is_cyclic


@dataclass(frozen=True)
class Planned:
    """A checked plan. Its figures are computed when they are read first.

    Attributes:
        graph: The captured pass. The plan's own taskgraph differs from it if the plan cuts weights,
            looks rows up, or runs cheap tasks again.
        memgraph: The plan.
        settings: How it was planned, with the settings that a baseline chose for its system.
    """

    graph: TaskGraph
    memgraph: MemGraph
    settings: PlanSettings

    @cached_property
    def timeline(self) -> Timeline:
        """Predicted times of a pass that follows itself."""
        return simulate(self.memgraph, self.settings.profile, entry_missing=self.memgraph.lost)

    @property
    def lower_bound_bytes(self) -> int:
        """Bytes that a rank reloads at least, whatever the plan, with these settings and budget.

        It holds for one batch at a time, with tasks in program order. Bytes that the host reads
        in its memory need not be reloaded.
        """
        return max(0, self._bound.nbytes // self.graph.num_ranks - host_bytes(self.memgraph.graph))

    @cached_property
    def lower_bound_ns(self) -> int:
        """Time that a pass takes at least; it holds as widely as ``lower_bound_bytes``."""
        profile, is_alone = self.settings.profile, self.graph.num_ranks == 1
        if profile.has_host and is_alone and policy_named(self.settings.policy).is_cyclic:
            return least_time_beside_host_ns(self._bound, profile)
        return self.lower_bound_alone_ns

    @cached_property
    def lower_bound_alone_ns(self) -> int:
        """The same for plans in which the host computes nothing."""
        most_bytes = self.memgraph.arena_bytes + self._bound.graph.workspace_bytes
        return least_time_ns(self._bound, self.settings.profile, most_bytes)

    @cached_property
    def _bound(self) -> LowerBound:
        """The lower bound under the budget that the arena was taken from."""
        return bound_of(self.graph, self.memgraph.arena_bytes, self.settings)


def bound_of(graph: TaskGraph, arena_bytes: int, settings: PlanSettings) -> LowerBound:
    """Return the lower bound of a pass under the budget that its arena is taken from.

    Args:
        graph: The captured pass.
        arena_bytes: Size of the arena.
        settings: How it is planned.
    """
    return lower_bound(
        graph if settings.split else graph_to_plan(graph, arena_bytes, settings),
        arena_bytes,
        settings.alignment,
        may_cut=settings.split,
        own_workspaces=True,
    )


def graph_to_plan(graph: TaskGraph, arena_bytes: int, settings: PlanSettings) -> TaskGraph:
    """Return the pass as the policy gets it. Results stay the same, bit by bit.

    Weights are unpacked a slice at a time. Rows that are looked up replace embedding tables that
    are in the way. A cyclic policy gets the rows as soon as not everything fits, for it then has
    more room to keep weights. Other policies that page get them if they could not run otherwise. If
    the rows are not enough, weights are cut where that changes no bit. A policy that cuts weights
    decides about rows itself, and the baselines get the pass as it is.

    Args:
        graph: The captured pass.
        arena_bytes: Size of the arena.
        settings: How to plan.

    Raises:
        ConfigError: Unknown policy.
    """
    policy, alignment = policy_named(settings.policy), settings.alignment
    graph = unpacking_that_fits(graph, policy=settings.policy, split=settings.split)
    if settings.cuts_weights or not policy.pages:
        return graph
    if min_arena_bytes(graph, alignment) > arena_bytes:
        return slices_that_fit(gather_rows(graph), arena_bytes, alignment)
    if policy.is_cyclic and needed_arena_bytes(graph, alignment) > arena_bytes:
        return gather_rows(graph, kept=tables_to_leave(graph, arena_bytes))
    return graph


def plan_checked(
    graph: TaskGraph,
    arena_bytes: int,
    settings: PlanSettings,
    shared: Sequence[SharedResident] = (),
) -> Planned:
    """Plan the pass that comes again and again, and check the plan.

    A cyclic policy lets the host compute where that is faster. A pass that leaves another residency
    than it finds is planned on what it leaves, until both agree. If they never do, the last plan is
    returned: a run of it reloads the difference in every pass.

    Args:
        graph: The captured pass.
        arena_bytes: Size of the arena.
        settings: How to plan.
        shared: The weights that an alternating pass keeps in the same arena.

    Raises:
        ConfigError: Unknown policy.
        PlanInfeasibleError: The arena is too small for this policy.
        InvalidPlanError: The plan breaks a rule, which is a fault of the planner.
    """
    policy, profile = policy_named(settings.policy), settings.profile
    with collector_off():
        problem = Problem(
            graph_to_plan(graph, arena_bytes, settings),
            arena_bytes,
            settings.alignment,
            profile,
            settings.split,
            shared=shared,
            engine=settings.engine,
        )
        if policy.engine_settings is not None and settings.engine is None:
            settings = replace(settings, engine=policy.engine_settings([(problem, 1)]))
            problem = replace(problem, engine=settings.engine)
        memgraph = policy.plan(problem)
        if profile.has_host and policy.is_cyclic:
            plans = [memgraph, *(policy.plan(problem.of(way)) for way in with_host_lane(problem))]
            memgraph = min(plans, key=lambda plan: predicted_ns(plan, profile))
        for _ in range(MAX_STEADY_ROUNDS):
            if set(memgraph.entry) == set(memgraph.exit):
                break
            memgraph = policy.plan(replace(problem, entry=memgraph.exit))
        return Planned(graph, check(memgraph), settings)


@contextmanager
def collector_off() -> Iterator[None]:
    """Stop Python's collector where many objects are made: it would walk all, again and again."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Device bytes that a pass needs.

    Attributes:
        graph: The pass in its smallest form, to name the task that needs most.
        alignment: Of extents, in bytes.
        non_arena_bytes: Bytes outside the arena.
        min_arena_bytes: The smallest arena in which the pass can run.
        needed_arena_bytes: The arena in which all weights stay resident.
    """

    graph: TaskGraph
    alignment: int
    non_arena_bytes: int
    min_arena_bytes: int
    needed_arena_bytes: int

    @property
    def min_budget_bytes(self) -> int:
        """The smallest device budget under which the pass can run."""
        return self.non_arena_bytes + self.min_arena_bytes

    @property
    def needed_budget_bytes(self) -> int:
        """The device budget under which all weights stay resident."""
        return self.non_arena_bytes + self.needed_arena_bytes

    def require_room(self, budget_bytes: int) -> None:
        """Refuse a device budget that is too small.

        Raises:
            PlanInfeasibleError: Names the task with the largest working set, and both budgets.
        """
        require_feasible(
            self.graph,
            budget_bytes - self.non_arena_bytes,
            self.alignment,
            non_arena_bytes=self.non_arena_bytes,
            least_bytes=self.min_arena_bytes,
        )


def needs_of(
    graph: TaskGraph,
    *,
    alignment: int,
    cuts_weights: bool,
    looks_up_rows: bool = True,
    library_bytes: int = 0,
) -> Needs:
    """Compute the device bytes that a pass needs.

    Args:
        graph: The captured pass.
        alignment: Of extents, in bytes.
        cuts_weights: Plans may cut weights.
        looks_up_rows: Plans may replace embedding tables by the rows that the pass looks up, and
            cut weights where no bit changes. The numbers of the rows are then counted as non-arena
            bytes.
        library_bytes: Device bytes of libraries, to add to the non-arena bytes.
    """
    if looks_up_rows:
        graph = unpack_by_rows(graph, cuts_products=cuts_weights)
    smallest = gather_rows(graph) if looks_up_rows else graph
    if cuts_weights:
        least = min_split_arena_bytes(graph, alignment)
    else:
        least_of = least_sliced_bytes if looks_up_rows else min_arena_bytes
        least = least_of(smallest, alignment)
    return Needs(
        graph=smallest,
        alignment=alignment,
        non_arena_bytes=non_arena_bytes(smallest, alignment) + library_bytes,
        min_arena_bytes=least,
        needed_arena_bytes=needed_arena_bytes(graph, alignment),
    )
