"""Lowers a memgraph to one ordered list of steps a lane, with the few waits that are needed.

Each lane runs its steps in order. So "wait for node n" means "wait until lane l has done k steps",
and a lane that has waited for step k need not wait for any step that step k waited for. A vector
clock for each node finds the waits that remain. Nodes that take no time only pass their clocks on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ds_finepage.graph.memgraph import Lane, MemGraph, Node, NodeKind, lane_of_late

LANES = tuple(Lane)


@dataclass(frozen=True, slots=True)
class Step:
    """One node on its lane.

    ``position`` counts the lane's steps from 1. ``waits`` are the steps that must be done before,
    as (lane, position). ``signals`` is True if another lane waits for this step.
    """

    node: Node
    lane: Lane
    position: int
    waits: tuple[tuple[Lane, int], ...]
    signals: bool


@dataclass(frozen=True, eq=False)
class Program:
    """The steps of a pass, by lane; :attr:`merged` has all of them in one topological order."""

    lanes: dict[Lane, tuple[Step, ...]]
    merged: tuple[Step, ...]

    @cached_property
    def mean_transfer_bytes(self) -> int:
        """Mean bytes of a transfer; 0 if there is none. Tasks do not count."""
        steps = self.lanes[Lane.H2D] + self.lanes[Lane.D2H] + self.lanes[Lane.DISK]
        found = [step.node.extent.nbytes for step in steps if step.node.extent is not None]
        return sum(found) // len(found) if found else 0


def lower(
    memgraph: MemGraph,
    *,
    missing: frozenset[int] = frozenset(),
    poison: bool = False,
) -> Program:
    """Lower a plan.

    Args:
        memgraph: A plan that passed the checker.
        missing: Buffers of ``entry`` that are not in place and must be reloaded first.
        poison: Make drops steps of the compute lane, so that they can fill the vacated extents.
    """
    clocks: list[tuple[int, ...]] = []
    known = {lane: [0] * len(LANES) for lane in LANES}
    done = [0] * len(LANES)
    drafts: list[tuple[Node, Lane, int, tuple[tuple[Lane, int], ...]]] = []
    clock_of: dict[tuple[Lane, int], tuple[int, ...]] = {}
    for node, before in zip(memgraph.nodes, memgraph.predecessors, strict=True):
        need = [max(c) for c in zip((0,) * len(LANES), *(clocks[b] for b in before), strict=True)]
        lane = _lane(memgraph, node, missing, poison)
        if lane is None:
            clocks.append(tuple(need))
            continue
        own, have = LANES.index(lane), known[lane]
        open_waits = [i for i in range(len(LANES)) if i != own and need[i] > have[i]]
        waits = tuple(
            (LANES[i], need[i])
            for i in open_waits
            if all(clock_of[LANES[j], need[j]][i] < need[i] for j in open_waits if j != i)
        )
        known[lane] = have = [max(a, b) for a, b in zip(have, need, strict=True)]
        done[own] += 1
        have[own] = done[own]
        clocks.append(tuple(have))
        clock_of[lane, done[own]] = clocks[-1]
        drafts.append((node, lane, done[own], waits))
    waited = {wait for *_, waits in drafts for wait in waits}
    merged = tuple(
        Step(node, lane, position, waits, signals=(lane, position) in waited)
        for node, lane, position, waits in drafts
    )
    return Program({lane: tuple(s for s in merged if s.lane is lane) for lane in LANES}, merged)


def _lane(memgraph: MemGraph, node: Node, missing: frozenset[int], poison: bool) -> Lane | None:
    if node.kind is NodeKind.RESIDENT and node.buffer in missing:
        return lane_of_late(memgraph, node)
    if node.kind is NodeKind.DROP and poison:
        return Lane.COMPUTE
    return memgraph.lane_of(node)
