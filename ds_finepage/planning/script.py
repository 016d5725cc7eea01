"""Turns the steps of a pass into a memgraph.

A baseline writes a script: the weights that it reloads, the tasks that it runs, the buffers that it
frees, the places where it waits. This module adds addresses and edges. Activations live from the
task that makes them to the one that uses them last, as in eager PyTorch. Offsets are placed offline
with all live ranges known, which is kinder than the caching allocator that other systems use.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.memgraph import Extent, MemGraph, Residency
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.builder import MemGraphBuilder
from ds_finepage.planning.layout import Tenancy, first_fit
from ds_finepage.planning.problem import Problem
from ds_finepage.units import format_bytes


class Act(enum.Enum):
    """The action of a step."""

    RELOAD = "reload"  # give a buffer bytes and copy its contents there
    COMPUTE = "compute"  # run a task
    DROP = "drop"  # free a buffer without a copy
    EVICT = "evict"  # free a buffer, and copy it to host memory first if it is not there
    AWAIT_COPIES = "await_copies"  # tasks from here on wait for all copies so far
    AWAIT_TASKS = "await_tasks"  # copies from here on wait for all tasks so far


_FREES = (Act.DROP, Act.EVICT)


@dataclass(frozen=True, slots=True)
class Step:
    """One step. ``subject`` is a buffer, or a task for COMPUTE; the waits have none."""

    act: Act
    subject: int = -1


@dataclass(frozen=True, slots=True)
class Script:
    """One steady pass. ``entry`` lists the weights that are resident when it begins.

    Invariant: if a step frees a weight of ``entry``, a later one reloads it. No other weight is
    resident when the pass ends.
    """

    policy: str
    entry: tuple[int, ...]
    steps: tuple[Step, ...]


@dataclass(slots=True)
class _Life:
    """A live range in steps; it may reach across the end of the pass (``begin > end``)."""

    buffer: int
    begin: int
    end: int = -1

    def steps(self, num_steps: int) -> Sequence[int]:
        if self.begin <= self.end:
            return range(self.begin, self.end + 1)
        return [*range(self.end + 1), *range(self.begin, num_steps)]


def realize(problem: Problem, script: Script) -> MemGraph:
    """Give a script addresses.

    Args:
        problem: The pass and its arena.
        script: The steps of the system in that pass.

    Raises:
        PlanInfeasibleError: The system holds more bytes at one time than the arena has.
    """
    problem.require_feasible()
    return _Realization(problem, script).run()


def live_bytes(problem: Problem, script: Script) -> int:
    """Return the most arena bytes that a script has in use at one time, whatever their offsets."""
    return _Realization(problem, script).most_live_bytes()


def largest_that_fits(
    problem: Problem, script_of: Callable[[int], Script], most: int, *, step: int = 1
) -> tuple[int, MemGraph] | None:
    """Find the largest number, from 0 to ``most``, whose script fits.

    Live bytes tell where to begin. Offsets may leave gaps, so smaller numbers follow, ``step`` by
    ``step``.

    Returns:
        The number and its plan; None if none fits.
    """
    least = 0
    while least < most:
        middle = (least + most + 1) // 2
        if live_bytes(problem, script_of(middle)) <= problem.arena_bytes:
            least = middle
        else:
            most = middle - 1
    for number in range(least, -1, -step):
        with contextlib.suppress(PlanInfeasibleError):
            return number, realize(problem, script_of(number))
    return None


class _Realization:
    """Live ranges, then offsets, then nodes."""

    def __init__(self, problem: Problem, script: Script) -> None:
        self._graph, self._arena_bytes = problem.graph, problem.arena_bytes
        self._alignment, self._size = problem.alignment, problem.size
        self._script = script
        self._steps = _with_activations(problem.graph, script.steps)
        freed = {s.subject for s in self._steps if s.act in _FREES}
        self._kept = dict.fromkeys(b for b in script.entry if b not in freed)
        self._kept_bytes = sum(self._size(b) for b in self._kept)

    def most_live_bytes(self) -> int:
        return self._busiest(self._lives())[0]

    def run(self) -> MemGraph:
        lives = self._lives()
        most, at = self._busiest(lives)
        self._require_room(most, at)
        placed = self._place(lives)
        top = self._kept_bytes + max((extent.end for extent in placed), default=0)
        self._require_room(top, at)
        return self._write(lives, placed)

    def _place(self, lives: Sequence[_Life]) -> list[Extent]:
        """Place lives, the largest first. One across the end of the pass has two stretches."""
        order = sorted(range(len(lives)), key=lambda i: (-self._size(lives[i].buffer), i))
        num_steps = len(self._steps)
        found = first_fit((self._size(lives[i].buffer), lives[i].steps(num_steps)) for i in order)
        return [extent for _, extent in sorted(zip(order, found, strict=True))]

    def _lives(self) -> list[_Life]:
        """Find the live ranges, in steps, of all buffers except the weights that are kept."""
        lives: list[_Life] = []
        current: dict[int, int] = {}
        for buffer in self._script.entry:
            if buffer not in self._kept:
                current[buffer] = len(lives)
                lives.append(_Life(buffer, 0))
        at_entry = dict(current)
        last_reload = {s.subject: i for i, s in enumerate(self._steps) if s.act is Act.RELOAD}
        for at, step in enumerate(self._steps):
            if step.act in _FREES:
                lives[current.pop(step.subject)].end = at
            elif step.act is Act.RELOAD:
                if step.subject in at_entry and last_reload[step.subject] == at:
                    # For the next pass, which finds it in the bytes that it had at entry.
                    current[step.subject] = at_entry[step.subject]
                    lives[at_entry[step.subject]].begin = at
                else:
                    current[step.subject] = len(lives)
                    lives.append(_Life(step.subject, at))
            elif step.act is Act.COMPUTE:
                for buffer in self._graph.paged(self._graph.tasks[step.subject]):
                    if buffer not in current and buffer not in self._kept:
                        current[buffer] = len(lives)
                        lives.append(_Life(buffer, at))
        assert all(life.end >= 0 for life in lives), "a buffer is left at the end of the pass"
        return lives

    def _busiest(self, lives: Sequence[_Life]) -> tuple[int, int]:
        """Return the largest sum of live bytes, and the first step that has it."""
        changes = [0] * (len(self._steps) + 1)
        for life in lives:
            size = self._size(life.buffer)
            changes[life.begin] += size
            changes[life.end + 1] -= size
            if life.begin > life.end:
                changes[0] += size
        most, most_at, live = 0, 0, self._kept_bytes
        for at, change in enumerate(changes[:-1]):
            live += change
            if live > most:
                most, most_at = live, at
        return most, most_at

    def _require_room(self, need: int, at: int) -> None:
        if need <= self._arena_bytes:
            return
        computed = [s.subject for s in self._steps[at:] if s.act is Act.COMPUTE]
        task = self._graph.tasks[computed[0]] if computed else self._graph.tasks[-1]
        raise PlanInfeasibleError(
            f"policy {self._script.policy!r} holds {format_bytes(need)} ({need} bytes) when it "
            f"comes to {task.where}; the arena has {format_bytes(self._arena_bytes)} "
            f"({self._arena_bytes} bytes). Raise finepage.device_budget by "
            f"{need - self._arena_bytes} bytes, or use a policy that pages op by op: finepage."
        )

    def _write(self, lives: Sequence[_Life], placed: Sequence[Extent]) -> MemGraph:
        builder = MemGraphBuilder(
            self._graph, self._script.policy, self._arena_bytes, self._alignment
        )
        tenancy = Tenancy()
        where: dict[tuple[int, int], Extent] = {}  # buffer, step at which it gets its bytes
        entry: dict[int, Extent] = {}
        offset = 0
        for buffer in self._kept:
            entry[buffer] = Extent(offset, self._size(buffer))
            offset += self._size(buffer)
        for i, life in enumerate(lives):
            extent = Extent(placed[i].offset + offset, placed[i].nbytes)
            where[life.buffer, life.begin] = extent
            if life.begin > life.end:
                entry[life.buffer] = extent
        builder.begin(tuple(Residency(b, entry[b]) for b in sorted(entry)))

        copies_to_await = tasks_to_await = last_copy = last_task = None
        for at, step in enumerate(self._steps):
            if step.act is Act.AWAIT_COPIES:
                copies_to_await = last_copy
            elif step.act is Act.AWAIT_TASKS:
                tasks_to_await = last_task
            elif step.act is Act.RELOAD:
                extent = where[step.subject, at]
                builder.alloc(step.subject, extent, tenancy.vacators(extent))
                last_copy = builder.reload(step.subject)
                if tasks_to_await is not None:
                    builder.sync(tasks_to_await, last_copy)
                    tasks_to_await = None  # the lane keeps its order, so one edge is enough
            elif step.act is Act.COMPUTE:
                task = self._graph.tasks[step.subject]
                for buffer in self._graph.paged(task):
                    if builder.states[buffer].extent is None:
                        extent = where[buffer, at]
                        builder.alloc(buffer, extent, tenancy.vacators(extent))
                last_task = builder.compute(task)
                if copies_to_await is not None:
                    builder.sync(copies_to_await, last_task)
                    copies_to_await = None
            else:
                held = builder.states[step.subject].extent
                assert held is not None
                is_drop = step.act is Act.DROP
                vacate = builder.drop if is_drop else builder.evict
                tenancy.free(held, vacate(step.subject))
        return builder.finish()


def _with_activations(graph: TaskGraph, steps: Sequence[Step]) -> list[Step]:
    """Drop every activation after the task that uses it last."""
    last_use = [found[-1] if found else -1 for found in graph.uses]
    found: list[Step] = []
    for step in steps:
        found.append(step)
        if step.act is Act.COMPUTE:
            task = graph.tasks[step.subject]
            found += [
                Step(Act.DROP, b)
                for b in graph.paged(task)
                if graph.buffers[b].kind is BufferKind.ACTIVATION and last_use[b] == task.index
            ]
    return found
