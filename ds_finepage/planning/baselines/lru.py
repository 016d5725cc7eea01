"""Policy ``lru``: demand paging, as unified memory does it (floor 2, no torch).

Nothing looks ahead. A task runs until it touches what is not there; then it waits while that is
copied in, and copies and tasks never overlap. What has not been used for longest goes first: a
clean buffer is dropped, a dirty one is copied out. An activation is freed behind the task that uses
it last, as in eager PyTorch. It is kinder than the real thing in three ways: whole buffers instead
of pages, so no price for faults; read-only weights are known to be clean; a result is not copied in
before it is written.
"""

from __future__ import annotations

from ds_finepage.graph.memgraph import Extent, MemGraph, Residency
from ds_finepage.graph.taskgraph import BufferKind, Task, TaskGraph
from ds_finepage.planning.blocks import BlockList
from ds_finepage.planning.builder import MemGraphBuilder
from ds_finepage.planning.liveness import aligned, require_feasible, uses


def plan_lru(
    graph: TaskGraph, *, arena_bytes: int, alignment: int, entry: tuple[Residency, ...] = ()
) -> MemGraph:
    """Plan what demand paging does in a pass that finds ``entry`` resident.

    Raises:
        PlanInfeasibleError: Some task's working set is larger than the arena.
    """
    require_feasible(graph, arena_bytes, alignment)
    return _Pager(graph, arena_bytes, alignment, entry).run()


class _Pager:
    """Runs the tasks in program order and brings in what each needs."""

    def __init__(
        self, graph: TaskGraph, arena_bytes: int, alignment: int, entry: tuple[Residency, ...]
    ) -> None:
        self._graph, self._alignment = graph, alignment
        self._last_task = [found[-1] if found else -1 for found in uses(graph)]
        self._used_at = [-1 for _ in graph.buffers]
        self._blocks = BlockList(arena_bytes)
        self._builder = MemGraphBuilder(graph, "lru", arena_bytes, alignment)
        num_tasks = len(graph.tasks)
        for residency in entry:
            self._blocks.alloc_at(residency.buffer, residency.extent)
            # The pass before was like this one, so that is when it was used.
            self._used_at[residency.buffer] = self._last_task[residency.buffer] - num_tasks
        self._builder.begin(entry)
        self._before: int | None = None  # node of the task before

    def run(self) -> MemGraph:
        for task in self._graph.tasks:
            self._bring_in(task)
            self._before = self._builder.compute(task)
            for buffer in self._graph.paged(task):
                self._used_at[buffer] = task.index
                is_weight = self._graph.buffers[buffer].kind is BufferKind.WEIGHT
                if not is_weight and self._last_task[buffer] == task.index:
                    self._blocks.free(buffer, self._builder.drop(buffer))
        return self._builder.finish()

    def _size(self, buffer: int) -> int:
        return aligned(self._graph.buffers[buffer].nbytes, self._alignment)

    def _missing(self, task: Task) -> list[int]:
        states = self._builder.states
        return [b for b in self._graph.paged(task) if states[b].extent is None]

    def _bring_in(self, task: Task) -> None:
        own = frozenset(self._graph.paged(task))
        for buffer in self._missing(task):
            found = self._blocks.alloc(buffer, self._size(buffer))
            if found is None:
                if not self._make_room(task, self._size(buffer), own):
                    self._repack(task)
                    return
                found = self._blocks.alloc(buffer, self._size(buffer))
                assert found is not None, "a window was freed that is too small"
            self._load(task, buffer, *found)

    def _load(self, task: Task, buffer: int, extent: Extent, vacators: list[int]) -> None:
        self._builder.alloc(buffer, extent, vacators)
        is_used = buffer in task.reads or buffer in task.touches
        if is_used and self._builder.states[buffer].host_copy is not None:
            copy = self._builder.reload(buffer)
            if self._before is not None:
                self._builder.sync(self._before, copy)

    def _make_room(self, task: Task, nbytes: int, own: frozenset[int]) -> bool:
        """Evict neighbours, the most recently used of which is the least recent there is."""
        victims = self._blocks.best_window(
            nbytes, lambda b: None if b in own else float(task.index - self._used_at[b])
        )
        for victim in victims or ():
            self._evict(victim)
        return victims is not None

    def _evict(self, buffer: int) -> None:
        node = self._builder.evict(buffer)
        if self._before is not None:
            self._builder.sync(self._before, node)
        self._blocks.free(buffer, node)

    def _repack(self, task: Task) -> None:
        """Put the task's buffers side by side, because they lie so that the rest does not fit.

        Pages know no such case; with whole buffers it is rare.
        """
        for block in list(self._blocks):
            if block.buffer is not None:
                self._evict(block.buffer)
        offset = 0
        for buffer in self._missing(task):
            extent = Extent(offset, self._size(buffer))
            self._load(task, buffer, extent, self._blocks.alloc_at(buffer, extent))
            offset = extent.end
