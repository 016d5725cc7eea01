"""The part of a report that follows from more than the files of a folder; its caller works it out.

Plans of other policies need the planner, and the fastest run needs a judge. Neither is here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.timeline import Timeline

PROFILE_FILE = "profile.json"
"""In the folder of a single run: the measured rates of its machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPass:
    """A pass as one policy plans it; without a plan, ``reason`` says why there is none.

    Attributes:
        policy: The policy's name.
        memgraph: Its plan; None if there is none.
        timeline: The plan's predicted timeline.
        reason: Why there is no plan.
    """

    policy: str
    memgraph: MemGraph | None = None
    timeline: Timeline | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLine:
    """The time of a decode step under several budgets.

    Attributes:
        policy: The policy's name.
        points: Budget in bytes, and nanoseconds; None where there is no plan.
    """

    policy: str
    points: tuple[tuple[int, int | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The part of a report that is not in the figures of its runs.

    Attributes:
        sentences: The winner of each batch, in words.
        fastest: The names of the fastest runs.
        hardware: The machine that other plans are simulated on.
        passes: Run name -> pass name -> the pass by its own policy, then by others.
        curves: Batch -> a line for each policy.
        remarks: Things that are left out, and why.
    """

    sentences: tuple[str, ...] = ()
    fastest: frozenset[str] = frozenset()
    hardware: str = ""
    passes: dict[str, dict[str, tuple[SimulatedPass, ...]]] = field(default_factory=dict)
    curves: dict[int, tuple[BudgetLine, ...]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
