"""Plans of passes that come again and again, by the road of the product."""

from __future__ import annotations

from typing import Any

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.pipeline import PlanSettings, plan_checked
from tests.unit.planning.finepage.test_search import machine


def plan_settings(
    *,
    policy: str,
    alignment: int = 64,
    profile: HardwareProfile | None = None,
    split: bool = False,
) -> PlanSettings:
    """Return settings; without a profile, those of a machine that is made up."""
    return PlanSettings(
        policy=policy, split=split, alignment=alignment, profile=profile or machine(h2d=1e9)
    )


def plan_steady(graph: TaskGraph, *, arena_bytes: int, **settings: Any) -> MemGraph:
    """Return the checked plan of a pass."""
    return plan_checked(graph, arena_bytes, plan_settings(**settings)).memgraph
