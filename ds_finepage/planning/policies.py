"""The policies by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_finepage.config import did_you_mean
from ds_finepage.errors import ConfigError
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
from ds_finepage.planning.horizon import (
    plan_horizon,
    plan_horizon_published,
)
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.unpacking import unpack_by_rows

EngineSettings = ZeroSettings | MapSettings
"""Settings of a system that a baseline stands for, which hold for all passes of a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy and its abilities.

    Attributes:
        name: The name that settings and plans give it.
        plan: Plans one pass.
        pages: It pages op by op, so any arena in which every task fits is enough. The others do
            what another system does, and may need more.
        is_cyclic: It pages, cuts weights, and chooses the residency that a pass finds and leaves.
        is_zero: It stands for ZeRO-Inference.
        engine_settings: Chooses the settings of the system that a baseline stands for, for passes
            of one model, given with the number of times that each runs. None if there are none.
    """

    name: str
    plan: Callable[[Problem], MemGraph]
    pages: bool = False
    is_cyclic: bool = False
    is_zero: bool = False
    engine_settings: Callable[[Sequence[tuple[Problem, int]]], EngineSettings] | None = None


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
        Policy(name="finepage", plan=plan_finepage, pages=True, is_cyclic=True),
        Policy(name="horizon", plan=plan_horizon, pages=True),
        Policy(name="horizon-published", plan=plan_horizon_published, pages=True),
        _zero("zero", lambda passes: ZeroSettings()),
        _zero("zero-persistence", best_settings),
        Policy(name="accelerate-map", plan=plan_accelerate_map, engine_settings=map_settings),
        Policy(name="lru", plan=plan_lru),
        Policy(name="static", plan=plan_static),
    )
}


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
    return unpack_by_rows(graph, cuts_products=split and chosen.is_cyclic)
