"""The problem that every policy solves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph, Residency
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.finepage.stacking import SharedResident
from ds_finepage.planning.liveness import extent_bytes, min_arena_bytes, require_feasible
from ds_finepage.planning.simulator import predicted_ns

if TYPE_CHECKING:
    from ds_finepage.planning.baselines.accelerate import MapSettings
    from ds_finepage.planning.baselines.zero import ZeroSettings


@dataclass(frozen=True, slots=True)
class Problem:
    """A pass to plan in an arena.

    Attributes:
        graph: The pass.
        arena_bytes: Size of the arena.
        alignment: Of extents, in bytes.
        profile: The machine. Without one, a policy plans for few bytes instead of a short time.
        split: The policy may cut weights, if it can.
        entry: Weights that are resident when the pass begins, for policies that carry residency
            from pass to pass.
        engine: Settings that a baseline takes for its system, instead of choosing them.
        shared: Weights that the alternating pass keeps in the same arena, highest offset first. A
            cyclic policy leaves them in place as far as there is room, and keeps nothing else that
            it would have to reload whenever the passes alternate.
    """

    graph: TaskGraph
    arena_bytes: int
    alignment: int = 64
    profile: HardwareProfile | None = None
    split: bool = False
    entry: tuple[Residency, ...] = ()
    shared: Sequence[SharedResident] = ()
    engine: ZeroSettings | MapSettings | None = None

    def of(self, graph: TaskGraph) -> Problem:
        """Return the same problem for a rewritten pass."""
        return dataclasses.replace(self, graph=graph)

    def cost_of(self, plan: MemGraph) -> int:
        """Return the predicted time of a plan; without a machine, the bytes that it moves."""
        if self.profile is None:
            return plan.reloaded_bytes + plan.offloaded_bytes
        return predicted_ns(plan, self.profile)

    @property
    def top(self) -> int:
        """The upper end of the arena, rounded down to the alignment."""
        return self.arena_bytes // self.alignment * self.alignment

    def size(self, buffer: int) -> int:
        """Return the bytes of a buffer's extent."""
        return extent_bytes(self.graph.buffers[buffer].nbytes, self.alignment)

    def sizes(self, buffers: Sequence[int]) -> dict[int, int]:
        """Return the bytes of the extents of some buffers."""
        return {b: self.size(b) for b in buffers}

    @property
    def is_feasible(self) -> bool:
        """Tell whether the arena can hold the working set of every task."""
        return min_arena_bytes(self.graph, self.alignment) <= self.arena_bytes

    def require_feasible(self) -> None:
        """Refuse an arena that cannot hold the working set of some task.

        Raises:
            PlanInfeasibleError: Names the task with the largest working set, and both numbers.
        """
        require_feasible(self.graph, self.arena_bytes, self.alignment)
