"""Settings, passes and stand-ins for tests of the runtime that need no model."""

from __future__ import annotations

from typing import Any

import torch

from ds_finepage.config import FinepageConfig
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.pipeline import Needs, needs_of, plan_checked
from ds_finepage.runtime.passes import Pass
from ds_finepage.runtime.settings import RunSettings
from tests.unit.planning.finepage.test_search import machine
from tests.unit.planning.sketches import chain

UNIT = 64
PROFILE = machine(h2d=1e9)


def run_settings(budget_bytes: int = 1 << 30, **changes: Any) -> RunSettings:
    """Make settings for the CPU, whose alignment is one unit."""
    keys = {n: changes.pop(n) for n in ("policy", "split", "debug") if n in changes}
    defaults: dict[str, Any] = {
        "config": FinepageConfig(**keys),
        "device": torch.device("cpu"),
        "budget_bytes": budget_bytes,
        "profile": PROFILE,
    }
    return RunSettings(**{**defaults, **changes})


def needs_for(graph: TaskGraph, settings: RunSettings) -> Needs:
    planning = settings.planning
    return needs_of(graph, alignment=planning.alignment, cuts_weights=planning.cuts_weights)


def sized_pass(graph: TaskGraph, settings: RunSettings | None = None) -> Pass:
    """Make a pass whose ops count as measured."""
    return Pass(graph, needs_for(graph, settings or run_settings()))


def planned_pass(arena_bytes: int = 7 * 1024) -> Pass:
    """Make a pass with nine weights of a KiB, and plan it."""
    found = sized_pass(chain(9, nbytes=1024))
    found.set_plan(plan_checked(found.graph, arena_bytes, run_settings().planning))
    return found


class KnownCosts:
    """Stands in for the meter of ops, all of which have been measured already."""

    def __init__(self, library_bytes: int = 0) -> None:
        self.library_bytes = library_bytes

    def with_costs(self, graph: TaskGraph, **_: object) -> TaskGraph:
        return graph

    def in_place(self, graph: TaskGraph) -> frozenset[int]:
        return frozenset(range(len(graph.tasks)))
