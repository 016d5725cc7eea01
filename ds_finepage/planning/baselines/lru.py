"""Policy ``lru``: demand paging, as unified memory does it.

No task is prefetched. A task that needs a missing buffer waits while it is copied in, so copies and
tasks never overlap. The least recently used buffer is evicted first: a clean one is dropped, a
dirty one is offloaded. An activation is freed after the task that uses it last, as in eager
PyTorch. The simulation is kinder than unified memory in three ways: a page fault costs no time, the
system knows that weights are clean, and a result is not copied in before it is written.
"""

from __future__ import annotations

import contextlib

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import BufferKind, Task
from ds_finepage.planning.liveness import min_arena_bytes
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.script import Act, Script, Step, realize

MAX_PASSES = 16
"""Passes to simulate before the resident buffers must be those of the pass before."""

GIVEN_UP_PERCENT = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 100)
"""Shares of the spare room to give up, in turn, until whole buffers fit as pages would."""


def plan_lru(problem: Problem) -> MemGraph:
    """Plan a steady pass of demand paging.

    Raises:
        PlanInfeasibleError: Some task's working set is larger than the arena, the buffers of
            consecutive tasks cannot be placed side by side in it, or no pass leaves the residency
            that it finds.
    """
    problem.require_feasible()
    spare = problem.arena_bytes - min_arena_bytes(problem.graph, problem.alignment)
    *first, last = (problem.arena_bytes - spare * share // 100 for share in GIVEN_UP_PERCENT)
    for room in first:
        with contextlib.suppress(PlanInfeasibleError):
            return realize(problem, _Pager(problem, room).steady_pass())
    return realize(problem, _Pager(problem, last).steady_pass())


class _Pager:
    """Bytes in use, by buffer, from the least to the most recently used."""

    def __init__(self, problem: Problem, room: int) -> None:
        self._graph, self._size, self._room = problem.graph, problem.size, room
        graph = problem.graph
        self._last_task = [found[-1] if found else -1 for found in graph.uses]
        self._resident: dict[int, int] = {}
        self._in_use = 0
        self._steps: list[Step] = []

    def steady_pass(self) -> Script:
        """Repeat the pass until it leaves the residency that it found.

        Raises:
            PlanInfeasibleError: It never does.
        """
        for _ in range(MAX_PASSES):
            before = list(self._resident)
            self._steps = []
            written = {b.id for b in self._graph.buffers if b.kind is not BufferKind.ACTIVATION}
            for task in self._graph.tasks:
                self._run(task, written)
            if list(self._resident) == before:
                return self._script(before)
        raise PlanInfeasibleError(
            f"policy 'lru' still changes its resident buffers after {MAX_PASSES} passes, so it has "
            f"no steady pass. Use a policy that plans one: finepage."
        )

    def _script(self, resident: list[int]) -> Script:
        """Write the script; drop at its end the residents that a pass evicts before using them.

        Pages could lie anywhere, but a whole buffer must have the same bytes in each pass.
        """
        evicted_unused: dict[int, None] = {}
        steps: list[Step] = []
        used: set[int] = set()
        for step in self._steps:
            if step.act is Act.EVICT and step.subject in resident and step.subject not in used:
                evicted_unused[step.subject] = None
                used.add(step.subject)
            else:
                steps.append(step)
            if step.act is Act.COMPUTE:
                used.update(self._graph.paged(self._graph.tasks[step.subject]))
        steps += [Step(Act.DROP, b) for b in evicted_unused]
        return Script("lru", tuple(b for b in resident if b not in evicted_unused), tuple(steps))

    def _run(self, task: Task, written: set[int]) -> None:
        own = self._graph.paged(task)
        for buffer in own:
            if buffer in self._resident:
                continue
            size = self._size(buffer)
            self._make_room(size, own)
            self._resident[buffer] = size
            self._in_use += size
            if buffer in written and (buffer in task.reads or buffer in task.touches):
                self._steps += [Step(Act.AWAIT_TASKS), Step(Act.RELOAD, buffer)]
        self._steps.append(Step(Act.COMPUTE, task.index))
        written.update(task.writes, task.touches)
        for buffer in own:
            size = self._resident.pop(buffer)
            is_weight = self._graph.buffers[buffer].kind is BufferKind.WEIGHT
            if is_weight or self._last_task[buffer] > task.index:
                self._resident[buffer] = size
            else:
                self._in_use -= size

    def _make_room(self, nbytes: int, own: tuple[int, ...]) -> None:
        for buffer in list(self._resident):
            if self._in_use + nbytes <= self._room:
                break
            if buffer not in own:
                self._in_use -= self._resident.pop(buffer)
                self._steps.append(Step(Act.EVICT, buffer))
