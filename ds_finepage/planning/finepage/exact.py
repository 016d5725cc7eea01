"""Plans tiny passes with the fewest moved bytes: the cheapest ways to make room, in turn.

A *gap* is the time from one use of a buffer to its next one; the last gap of a weight reaches into
the next pass. A buffer is held during a gap, or released and brought back. The search begins with
all gaps held. Where a task has too little room, it releases one gap there after another.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.script import Act, Script, Step, realize

MAX_TASKS = 8
MAX_BUFFERS = 14
MAX_WEIGHTS = 6
MAX_TRIED = 2000
"""Sets of released gaps to look at."""

NUM_LAYOUTS = 10
"""Orders in which the buffers of a set are placed at most."""


@dataclass(frozen=True, slots=True)
class _Gap:
    """The time between two uses of a buffer."""

    buffer: int
    after: int  # the task that uses it first
    before: int  # the one that uses it next; no later than ``after`` for one of the next pass
    is_needed: bool  # the next one reads what is there
    version: int | None  # numbers the contents, which one copy to host memory saves; None: a weight

    def covers(self, task: int) -> bool:
        """Tell whether a task runs in between."""
        if self.after < self.before:
            return self.after < task < self.before
        return task > self.after or task < self.before


def is_tiny(graph: TaskGraph) -> bool:
    """Tell whether a pass is small enough to look at all residencies."""
    paged = [b for b in graph.buffers if graph.uses[b.id] and b.kind.is_paged]
    weights = [b for b in paged if b.kind is BufferKind.WEIGHT]
    return (
        len(graph.tasks) <= MAX_TASKS
        and len(paged) <= MAX_BUFFERS
        and len(weights) <= MAX_WEIGHTS
        and not any(t.touches for t in graph.tasks)
        and not any(b.gather is not None for b in weights)
    )


def plan_exact(problem: Problem) -> MemGraph | None:
    """Plan a tiny pass with the fewest moved bytes; None if no layout was found."""
    graph, gaps = problem.graph, _gaps_of(problem.graph)
    waiting: list[tuple[int, tuple[int, ...]]] = [(0, ())]  # moved bytes, released gaps
    seen: set[tuple[int, ...]] = set()
    while waiting and len(seen) < MAX_TRIED:
        _, released = heapq.heappop(waiting)
        held = [g for g in range(len(gaps)) if g not in released]
        choice = _in_the_way(problem, gaps, held)
        if choice is None:
            choice = held  # unless the offsets fit
            with contextlib.suppress(PlanInfeasibleError):
                script = _script(graph, gaps, released)
                return realize(problem, script, num_orders=NUM_LAYOUTS)
        for gap in choice:
            more = tuple(sorted((*released, gap)))
            if more not in seen:
                seen.add(more)
                heapq.heappush(waiting, (_moved_bytes(graph, [gaps[g] for g in more]), more))
    return None


def _in_the_way(problem: Problem, gaps: list[_Gap], held: list[int]) -> list[int] | None:
    """Return the held gaps beside the first task that has too little room; None if all have it."""
    for task in problem.graph.tasks:
        beside = [g for g in held if gaps[g].covers(task.index)]
        needed = (*problem.graph.paged(task), *(gaps[g].buffer for g in beside))
        if sum(map(problem.size, needed)) > problem.arena_bytes:
            return beside
    return None


def _gaps_of(graph: TaskGraph) -> list[_Gap]:
    found = []
    for buffer, uses in enumerate(graph.uses):
        kind = graph.buffers[buffer].kind
        if not uses or not kind.is_paged:
            continue
        is_weight = kind is BufferKind.WEIGHT
        for after, before in pairwise((*uses, uses[0]) if is_weight else uses):
            writes = sum(buffer in graph.tasks[t].writes for t in uses if t <= after)
            is_needed = buffer in graph.tasks[before].reads
            found.append(_Gap(buffer, after, before, is_needed, None if is_weight else writes))
    return found


def _moved_bytes(graph: TaskGraph, released: Iterable[_Gap]) -> int:
    """Return the bytes of all reloads, and of one copy of each of the contents that are saved."""
    needed = [gap for gap in released if gap.is_needed]
    saved = {(gap.buffer, gap.version) for gap in needed if gap.version is not None}
    copied = [*(gap.buffer for gap in needed), *(buffer for buffer, _ in saved)]
    return sum(graph.buffers[b].nbytes for b in copied)


def _script(graph: TaskGraph, gaps: list[_Gap], released: tuple[int, ...]) -> Script:
    """Write the pass that holds all other gaps."""
    gone = [gaps[g] for g in released]
    steps: list[Step] = []
    for task in graph.tasks:
        back = [gap for gap in gone if gap.before == task.index and gap.is_needed]
        steps += [Step(Act.RELOAD, gap.buffer) for gap in back]
        steps.append(Step(Act.COMPUTE, task.index))
        for gap in gone:
            if gap.after == task.index:
                steps.append(Step(Act.EVICT if gap.is_needed else Act.DROP, gap.buffer))
    held = [gap for gap in gaps if gap not in gone]
    return Script("finepage", tuple(g.buffer for g in held if g.before <= g.after), tuple(steps))
