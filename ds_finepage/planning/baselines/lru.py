"""Policy ``lru``: demand paging, as unified memory does it.

Nothing looks ahead. A task runs until it touches what is not there; then it waits while that is
copied in, so copies and tasks never overlap. What has not been used for longest goes first: a clean
buffer is dropped, a dirty one is copied out. An activation is freed behind the task that uses it
last, as in eager PyTorch. It is kinder than the real thing in three ways: a fault has no price;
read-only weights are known to be clean; a result is not copied in before it is written.
"""

from __future__ import annotations

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import BufferKind, Task, TaskGraph
from ds_finepage.planning.baselines.script import Act, Script, Step, realize
from ds_finepage.planning.liveness import aligned, min_arena_bytes, require_feasible, uses

MAX_PASSES = 16
"""Passes to simulate before what is resident has to be the same as one pass ago."""

GIVEN_UP_PERCENT = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 100)
"""Shares of the spare room to do without until whole buffers lie side by side as pages would."""


def plan_lru(
    graph: TaskGraph,
    *,
    arena_bytes: int,
    alignment: int,
    profile: HardwareProfile | None = None,
) -> MemGraph:
    """Plan what demand paging does in a steady pass.

    Raises:
        PlanInfeasibleError: Some task's working set is larger than the arena, or the buffers that
            are used in a row cannot be placed side by side in it.
    """
    require_feasible(graph, arena_bytes, alignment)
    spare = arena_bytes - min_arena_bytes(graph, alignment)
    for percent in GIVEN_UP_PERCENT:
        pager = _Pager(graph, arena_bytes - spare * percent // 100, alignment)
        try:
            script = pager.steady_pass()
            return realize(graph, script, arena_bytes=arena_bytes, alignment=alignment)
        except PlanInfeasibleError:
            if percent == GIVEN_UP_PERCENT[-1]:
                raise
    raise AssertionError("unreachable")


class _Pager:
    """Bytes in use, by buffer, from the one that was used least recently to the latest."""

    def __init__(self, graph: TaskGraph, room: int, alignment: int) -> None:
        self._graph, self._room, self._alignment = graph, room, alignment
        self._last_task = [found[-1] if found else -1 for found in uses(graph)]
        self._resident: dict[int, int] = {}
        self._in_use = 0
        self._steps: list[Step] = []

    def steady_pass(self) -> Script:
        """Repeat the pass until it leaves behind what it found."""
        for _ in range(MAX_PASSES):
            before = list(self._resident)
            self._steps = []
            written = {b.id for b in self._graph.buffers if b.kind is not BufferKind.ACTIVATION}
            for task in self._graph.tasks:
                self._run(task, written)
            if list(self._resident) == before:
                return self._without_vain_residents(before)
        raise AssertionError("demand paging never comes to rest")

    def _without_vain_residents(self, resident: list[int]) -> Script:
        """Write the pass down; what would be thrown out before it is used goes when a pass ends.

        That is nearly everything that is resident then, and pages would not mind; but a whole
        buffer that lives across the end of the pass has to be in the same bytes in each pass.
        """
        vain: dict[int, None] = {}
        steps: list[Step] = []
        used: set[int] = set()
        for step in self._steps:
            if step.act is Act.EVICT and step.subject in resident and step.subject not in used:
                vain[step.subject] = None
                used.add(step.subject)
            else:
                steps.append(step)
            if step.act is Act.COMPUTE:
                used.update(self._graph.paged(self._graph.tasks[step.subject]))
        steps += [Step(Act.DROP, b) for b in vain]
        return Script("lru", tuple(b for b in resident if b not in vain), tuple(steps))

    def _run(self, task: Task, written: set[int]) -> None:
        own = self._graph.paged(task)
        for buffer in own:
            if buffer in self._resident:
                continue
            size = aligned(self._graph.buffers[buffer].nbytes, self._alignment)
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
