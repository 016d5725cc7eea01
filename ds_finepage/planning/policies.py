"""The policies by name, and the function that plans with one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ds_finepage.config import did_you_mean
from ds_finepage.errors import ConfigError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.baselines.accelerate import (
    MapSettings,
    map_settings,
    plan_accelerate_map,
)
from ds_finepage.planning.baselines.lru import plan_lru
from ds_finepage.planning.baselines.static import plan_static
from ds_finepage.planning.baselines.zero import ZeroSettings, plan_zero_with
from ds_finepage.planning.baselines.zero_search import best_settings
from ds_finepage.planning.finepage.search import plan_finepage
from ds_finepage.planning.finepage.stacking import SharedResident
from ds_finepage.planning.horizon import (
    plan_horizon,
    plan_horizon_published,
)
from ds_finepage.planning.host_lane import with_host_lane
from ds_finepage.planning.liveness import min_arena_bytes, needed_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.embeddings import gather_rows, tables_to_leave
from ds_finepage.planning.rewrite.exact_slices import slices_that_fit
from ds_finepage.planning.rewrite.unpacking import unpack_by_rows
from ds_finepage.planning.simulator import predicted_ns

EngineSettings = ZeroSettings | MapSettings
"""Settings of a system that a baseline stands for, which hold for all passes of a model."""

MAX_STEADY_ROUNDS = 8
"""Passes to plan before taking a plan whose exit differs from its entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy and its abilities.

    Attributes:
        name: The name that settings and plans give it.
        plan: Plans one pass.
        pages: It pages op by op, so any arena in which every task fits is enough. The others do
            what another system does, and may need more.
        is_cyclic: It pages, and chooses the residency that a pass finds and leaves.
        can_split: It can cut weights.
        is_zero: It stands for ZeRO-Inference.
        engine_settings: Chooses the settings of the system that a baseline stands for, for passes
            of one model, given with the number of times that each runs. None if there are none.
    """

    name: str
    plan: Callable[[Problem], MemGraph]
    pages: bool = False
    is_cyclic: bool = False
    can_split: bool = False
    is_zero: bool = False
    engine_settings: Callable[[Sequence[tuple[Problem, int]]], EngineSettings] | None = None

    @property
    def carries_residency(self) -> bool:
        """True if the policy takes the residency that it finds, and leaves another."""
        return self.pages and not self.is_cyclic


def _zero(name: str, choose: Callable[[Sequence[tuple[Problem, int]]], ZeroSettings]) -> Policy:
    """Return a policy of DeepSpeed with some settings."""

    def plan(problem: Problem) -> MemGraph:
        settings = problem.engine or choose([(problem, 1)])
        assert isinstance(settings, ZeroSettings)
        return plan_zero_with(problem, settings, name)

    return Policy(name=name, plan=plan, is_zero=True, engine_settings=choose)


POLICIES = {
    policy.name: policy
    for policy in (
        Policy(name="finepage", plan=plan_finepage, pages=True, is_cyclic=True, can_split=True),
        Policy(name="horizon", plan=plan_horizon, pages=True),
        Policy(name="horizon-published", plan=plan_horizon_published, pages=True),
        _zero("zero", lambda passes: ZeroSettings()),
        _zero("zero-persistence", best_settings),
        Policy(name="accelerate-map", plan=plan_accelerate_map, engine_settings=map_settings),
        Policy(name="lru", plan=plan_lru),
        Policy(name="static", plan=plan_static),
    )
}

PAGING = tuple(p.name for p in POLICIES.values() if p.pages)
CYCLIC = tuple(p.name for p in POLICIES.values() if p.is_cyclic)
CAN_SPLIT = tuple(p.name for p in POLICIES.values() if p.can_split)


def policy_named(name: str) -> Policy:
    """Return a policy.

    Raises:
        ConfigError: Unknown policy.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}. {did_you_mean(name, POLICIES)}")
    return POLICIES[name]


def unpacking_that_fits(graph: TaskGraph, *, policy: str, split: bool) -> TaskGraph:
    """Unpack weights a slice at a time, if the policy pages. The baselines get the pass as it is.

    Args:
        graph: The pass.
        policy: A key of ``POLICIES``.
        split: The policy may cut weights and products, if it can.

    Raises:
        ConfigError: Unknown policy.
    """
    chosen = policy_named(policy)
    if not chosen.pages:
        return graph
    return unpack_by_rows(graph, cuts_products=split and chosen.can_split)


def with_parts_that_fit(
    graph: TaskGraph, *, arena_bytes: int, policy: str, alignment: int
) -> TaskGraph:
    """Replace embedding tables by the rows that are looked up, if the tables are in the way.

    Results stay the same, bit by bit. A cyclic policy gets the rows as soon as not everything fits,
    for it then has more room to keep weights. Other policies that page get them if they could not
    run otherwise. If the rows are not enough, weights are cut where that changes no bit. The
    baselines get the pass as it is.

    Args:
        graph: The pass.
        arena_bytes: Size of the arena.
        policy: A key of ``POLICIES``.
        alignment: Of extents, in bytes.

    Raises:
        ConfigError: Unknown policy.
    """
    chosen = policy_named(policy)
    if not chosen.pages:
        return graph
    if min_arena_bytes(graph, alignment) > arena_bytes:
        return slices_that_fit(gather_rows(graph), arena_bytes, alignment)
    if chosen.is_cyclic and needed_arena_bytes(graph, alignment) > arena_bytes:
        return gather_rows(graph, kept=tables_to_leave(graph, arena_bytes))
    return graph


def plan_steady(
    graph: TaskGraph,
    *,
    arena_bytes: int,
    policy: str,
    alignment: int = 64,
    profile: HardwareProfile | None = None,
    split: bool = False,
    shared: Sequence[SharedResident] = (),
    engine: EngineSettings | None = None,
) -> MemGraph:
    """Plan the pass that follows itself again and again.

    A policy that carries residency is planned on its own exit until entry and exit agree. If they
    never do, the last plan is returned: a run of it reloads the difference in every pass.

    Args:
        graph: The pass. The plan's taskgraph differs from it if the plan cuts weights, looks rows
            up, or runs cheap tasks again.
        arena_bytes: Size of the arena.
        policy: A key of ``POLICIES``.
        alignment: Of extents, in bytes.
        profile: The machine. Without one, the policy plans for few bytes. If it knows the host, a
            cyclic policy lets the host compute products where that is faster.
        split: The policy may cut weights, if it can.
        shared: Weights that the alternating pass keeps in the same arena.
        engine: Settings that a baseline takes for its system, instead of choosing them.

    Raises:
        ConfigError: Unknown policy.
        PlanInfeasibleError: The arena is too small for this policy.
    """
    chosen = policy_named(policy)
    graph = unpacking_that_fits(graph, policy=policy, split=split)
    if not (split and chosen.can_split):
        graph = with_parts_that_fit(
            graph, arena_bytes=arena_bytes, policy=policy, alignment=alignment
        )
    problem = Problem(graph, arena_bytes, alignment, profile, split, shared=shared, engine=engine)
    found = chosen.plan(problem)
    if profile is not None and profile.has_host and chosen.is_cyclic:
        found = _with_host_lane(problem, profile, chosen, found)
    for _ in range(MAX_STEADY_ROUNDS if chosen.carries_residency else 0):
        if set(found.entry) == set(found.exit):
            break
        found = chosen.plan(replace(problem, entry=found.exit))
    return found


def _with_host_lane(
    problem: Problem, profile: HardwareProfile, policy: Policy, best: MemGraph
) -> MemGraph:
    """Return the faster plan: the best one without the lane of the host, or one with it."""
    plans = [best, *(policy.plan(problem.of(graph)) for graph in with_host_lane(problem))]
    return min(plans, key=lambda plan: predicted_ns(plan, profile)[0])
