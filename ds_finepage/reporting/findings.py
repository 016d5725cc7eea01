"""The part of a report that follows from more than the files of a folder; its caller works it out.

Plans of other policies need the planner, and the fastest run needs a judge. Neither is here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.timeline import Timeline
from ds_finepage.reporting.memory import MemorySeries, memory_over_time
from ds_finepage.units import format_ns

PROFILE_FILE = "profile.json"
"""In the folder of a single run: the measured rates of its machine."""


MemoryRow = tuple[str, MemorySeries | None, str]
"""A pass as one policy plans it: the policy, its device memory over time, and its time in words. If
there is no plan: the policy, None, and why."""

BudgetLine = list[tuple[int, int | None]]
"""Budgets in bytes, and the nanoseconds of a decode step; None where there is no plan."""

MOST_WORDS = 110
"""Characters of a reason in a picture."""


def memory_row(memgraph: MemGraph, timeline: Timeline) -> MemoryRow:
    """Return a planned pass for a picture of policies."""
    series = memory_over_time(memgraph, timeline)
    return memgraph.policy, series, format_ns(timeline.total_ns)


def refused_row(policy: str, error: Exception) -> MemoryRow:
    """Return a pass without a plan for a picture of policies."""
    text = str(error)
    text = text if len(text) <= MOST_WORDS else text[: MOST_WORDS - 3].rstrip() + "..."
    return policy, None, f"no plan. {text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The part of a report that is not in the figures of its runs.

    Attributes:
        sentences: The winner of each batch, in words.
        fastest: The names of the fastest runs.
        hardware: The machine that other plans are simulated on.
        passes: Run name -> pass name -> the pass by its own policy, then by others.
        curves: Batch -> policy -> its line.
        remarks: Things that are left out, and why.
    """

    sentences: tuple[str, ...] = ()
    fastest: frozenset[str] = frozenset()
    hardware: str = ""
    passes: dict[str, dict[str, list[MemoryRow]]] = field(default_factory=dict)
    curves: dict[int, dict[str, BudgetLine]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
