"""Plans beside those of the runs, which a report compares them with; made by its caller."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.timeline import Timeline


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
        name: The policy or the arm.
        points: Budget in bytes, and nanoseconds; None where there is no plan.
    """

    name: str
    points: tuple[tuple[int, int | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Everything in a report that other plans give.

    Attributes:
        hardware: The machine that they are simulated on.
        passes: Run name -> pass name -> the pass by its own policy, then by others.
        curves: Batch -> a line for each policy.
    """

    hardware: str = ""
    passes: dict[str, dict[str, tuple[SimulatedPass, ...]]] = field(default_factory=dict)
    curves: dict[int, tuple[BudgetLine, ...]] = field(default_factory=dict)
