"""The policies by name, and the one function that plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_finepage.config import did_you_mean
from ds_finepage.errors import ConfigError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph, Residency
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.baselines.lru import plan_lru
from ds_finepage.planning.baselines.static import plan_static, plan_static_zigzag
from ds_finepage.planning.baselines.zero import (
    plan_zero,
    plan_zero_authors,
    plan_zero_persistence,
)
from ds_finepage.planning.finepage.search import plan_finepage
from ds_finepage.planning.finepage.stacking import SharedResident
from ds_finepage.planning.horizon import plan_horizon, plan_horizon_outputs
from ds_finepage.planning.liveness import min_arena_bytes, needed_arena_bytes
from ds_finepage.planning.rewrite.split import gather_rows

MAX_STEADY_ROUNDS = 8
"""Passes to plan before taking a plan whose exit differs from its entry."""

# Policies that take the residency they find and leave another behind.
CARRYING: dict[str, Callable[..., MemGraph]] = {
    "horizon": plan_horizon,
    "horizon-outputs": plan_horizon_outputs,
}
# Policies whose exit residency is their entry residency by construction.
CYCLIC: dict[str, Callable[..., MemGraph]] = {"finepage": plan_finepage}
# What other systems do, cyclic too. They may refuse an arena in which every task would fit.
BASELINES: dict[str, Callable[..., MemGraph]] = {
    "zero": plan_zero,
    "zero-authors": plan_zero_authors,
    "zero-persistence": plan_zero_persistence,
    "lru": plan_lru,
    "static": plan_static,
    "static-zigzag": plan_static_zigzag,
}

PAGING = {**CYCLIC, **CARRYING}
"""Policies that page op by op: they make do with any arena in which every task fits."""

POLICIES = {**PAGING, **BASELINES}

RUNNABLE = tuple(name for name in POLICIES if name != "static-zigzag")
"""Policies whose plans can be executed; the others plan for several calls at a time."""

CAN_SPLIT = frozenset({"finepage"})
"""Policies that can cut weights."""


def plan(
    graph: TaskGraph,
    *,
    arena_bytes: int,
    policy: str,
    alignment: int = 64,
    entry: tuple[Residency, ...] = (),
    profile: HardwareProfile | None = None,
    split: bool = False,
    shared: Sequence[SharedResident] = (),
) -> MemGraph:
    """Plan one pass.

    Args:
        graph: The pass.
        arena_bytes: Size of the arena.
        policy: A key of ``POLICIES``.
        alignment: Of extents, in bytes.
        entry: Weights that are resident before the pass; cyclic policies choose their own.
        profile: Rates for policies that plan for time.
        split: Let a policy that can do so cut weights; its plan's taskgraph is then another one.
            So it may be without, where ``finepage`` runs cheap tasks again.
        shared: What the pass before and after this one keeps; see ``plan_finepage``.

    Raises:
        ConfigError: Unknown policy.
        PlanInfeasibleError: Some task's working set is larger than the arena, or a baseline needs
            more than that.
    """
    if policy in BASELINES:
        return BASELINES[policy](
            graph, arena_bytes=arena_bytes, alignment=alignment, profile=profile
        )
    if policy in CYCLIC:
        return CYCLIC[policy](
            graph,
            arena_bytes=arena_bytes,
            alignment=alignment,
            profile=profile,
            split=split,
            shared=shared,
        )
    if policy in CARRYING:
        return CARRYING[policy](graph, arena_bytes=arena_bytes, alignment=alignment, entry=entry)
    raise ConfigError(f"unknown policy {policy!r}. {did_you_mean(policy, POLICIES)}")


def with_tables_that_fit(
    graph: TaskGraph, *, arena_bytes: int, policy: str, alignment: int
) -> TaskGraph:
    """Replace embedding tables by the rows that are looked up, where the tables are in the way.

    Nothing is cut, so results stay the same, bit by bit. A policy that keeps what it can has more
    room without a table as soon as not everything fits; the others are given the rows where they
    could not run at all. What other systems do is left as it is.
    """
    if policy not in PAGING:
        return graph
    if min_arena_bytes(graph, alignment) > arena_bytes:
        return gather_rows(graph)
    if policy in CYCLIC and needed_arena_bytes(graph, alignment) > arena_bytes:
        return gather_rows(graph, whole_tables=True)
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
) -> MemGraph:
    """Plan the pass that comes again and again.

    The plan's taskgraph is another one where ``split`` cuts, or an embedding table does not fit.

    A policy that carries residency over is planned on its own exit until entry and exit agree. If
    they never do, the last plan stands, and whoever runs it has to reload the difference.
    """
    if not split or policy not in CAN_SPLIT:
        graph = with_tables_that_fit(
            graph, arena_bytes=arena_bytes, policy=policy, alignment=alignment
        )
    found = plan(
        graph,
        arena_bytes=arena_bytes,
        policy=policy,
        alignment=alignment,
        profile=profile,
        split=split,
        shared=shared,
    )
    for _ in range(MAX_STEADY_ROUNDS if policy in CARRYING else 0):
        if set(found.entry) == set(found.exit):
            break
        found = plan(
            graph, arena_bytes=arena_bytes, policy=policy, alignment=alignment, entry=found.exit
        )
    return found
