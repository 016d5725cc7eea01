"""Policy ``horizon``: the published two-horizon simulation.

The execution horizon E walks over the tasks and simulates each. The allocation horizon A >= E runs
ahead and gives memory to tasks as long as memory is free. Nothing is evicted for lookahead. Once E
has caught up with A, the planner evicts the window of blocks whose soonest next use is farthest
away.

Source: "Fine-Grained Paging Mechanism for Offloading-Reloading Tensor for LLM" (Rice University,
2025, hdl.handle.net/1911/118527), whose routines keep their names here, and Turnip
(arXiv 2405.16283).

[Note: departures from the published algorithm]
1. A clean buffer is dropped, not offloaded: its host copy still holds.
2. A buffer that is reserved and not yet written is dropped without a copy.
3. A buffer has one slot in host memory for the whole pass, so its copy is made once.
4. A pass is planned again on the residency that it leaves, until that is what it finds
   (``pipeline.plan_checked``). The published algorithm plans one pass.
5. If the buffers of one task fit only side by side, all others are evicted and these get new
   places (:meth:`HorizonPlanner._repack`). The published algorithm has no answer there.
6. A weight stays after its last use until its bytes are needed, for the next pass uses it again.
7. Workspaces of ops are counted outside the arena (``budget.non_arena_bytes``), not placed in it.

Policy ``horizon-published`` takes 1 and 3 back, so it shows the worth of these two: it offloads
whatever it evicts and needs again in the pass, and copies a weight to host memory that has it
already. Rows of an embedding table and of a KV cache are dropped all the same. It keeps 2 and 4 to
7, without which a pass might have no plan, or none that follows itself.
"""

from __future__ import annotations

from ds_finepage.graph.memgraph import PUBLISHED, Extent, MemGraph
from ds_finepage.graph.taskgraph import Task
from ds_finepage.graph.unpacking import unpacked_buffers
from ds_finepage.planning.blocks import BlockList
from ds_finepage.planning.builder import MemGraphBuilder
from ds_finepage.planning.problem import Problem

INFINITY = float("inf")


class HorizonPlanner:
    """Simulates one pass over a taskgraph and writes the memgraph on the way.

    Invariant: every buffer of the tasks in [E, A) that lives in the arena owns an extent.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        policy: str,
        streamed: frozenset[int] = frozenset(),
        copies_clean: bool = False,
    ) -> None:
        """Prepare a simulation.

        Args:
            problem: The pass and its arena. The weights of its ``entry`` are resident at first.
            policy: Name to write into the memgraph.
            streamed: Weights to drop after their last use in the pass. The others are kept until
                their bytes are needed.
            copies_clean: Offload evicted buffers even if their host copy still holds.

        Raises:
            PlanInfeasibleError: Some task's working set is larger than the arena.
        """
        problem.require_feasible()
        graph, arena_bytes = problem.graph, problem.arena_bytes
        self._graph = graph
        self._size = problem.size
        self._uses = graph.uses
        self._position = [0] * len(graph.buffers)  # first use that is not simulated yet
        self._streamed = streamed
        self._copies_clean = copies_clean
        self._unpacked = _large_unpacked_weights(problem)
        self._blocks = BlockList(arena_bytes)
        self._builder = MemGraphBuilder(graph, policy, arena_bytes, problem.alignment)
        for residency in problem.entry:
            self._blocks.alloc_at(residency.buffer, residency.extent)
        self._builder.begin(problem.entry)
        self._allocation_horizon = 0
        self._execution_horizon = 0

    def plan_working_set(self) -> MemGraph:
        """Run the variant that reserves all of a task's buffers at once.

        It never evicts a buffer that is reserved and not yet written.
        """
        tasks = self._graph.tasks
        freed = True
        while self._execution_horizon < len(tasks):
            if freed:
                while self._allocation_horizon < len(tasks) and self._reserve(
                    tasks[self._allocation_horizon]
                ):
                    self._allocation_horizon += 1
            task = tasks[self._execution_horizon]
            if self._allocation_horizon == self._execution_horizon:
                self._force_all(task)
                self._allocation_horizon += 1
            freed = self._simulate(task)
            self._execution_horizon += 1
        return self._builder.finish()

    # The three routines of the thesis.

    def sim_malloc(self, buffer: int) -> bool:
        """Give a buffer an extent if free memory allows it; evict nothing."""
        found = self._blocks.alloc(buffer, self._size(buffer))
        if found is None:
            return False
        extent, vacators = found
        self._builder.alloc(buffer, extent, vacators)
        return True

    def sim_malloc_offload(self, buffer: int, protected: tuple[int, ...]) -> bool:
        """Give a buffer an extent, evicting the victims whose next use is farthest away.

        Returns:
            False if every large enough window holds a protected buffer.
        """
        if self.sim_malloc(buffer):
            return True
        victims = self._blocks.best_window(
            self._size(buffer),
            lambda b: None if b in protected else self._next_use(b),
        )
        if victims is None:
            return False
        for victim in victims:
            self._evict(victim)
        done = self.sim_malloc(buffer)
        assert done, "a window was freed that is too small"
        return True

    def sim_malloc_force_reload(self, buffer: int, protected: tuple[int, ...]) -> bool:
        """Give a stored buffer an extent, evicting others if needed, and reload its contents."""
        if not self.sim_malloc_offload(buffer, protected):
            return False
        self._builder.reload(buffer)
        return True

    # The parts of a pass.

    def _next_use(self, buffer: int) -> float:
        uses, position = self._uses[buffer], self._position[buffer]
        return uses[position] if position < len(uses) else INFINITY

    def _evict(self, buffer: int) -> None:
        """Take a buffer's extent away; offload contents that are needed and dirty."""
        upcoming = self._next_use(buffer)
        is_needed = False
        if upcoming != INFINITY:
            task = self._graph.tasks[int(upcoming)]
            is_needed = buffer in task.reads or buffer in task.touches
        is_whole = self._graph.buffers[buffer].gather is None
        node = self._builder.evict(
            buffer, is_needed=is_needed, copies_clean=self._copies_clean and is_whole
        )
        self._blocks.free(buffer, node)

    def _missing(self, task: Task) -> list[int]:
        states = self._builder.states
        return [b for b in self._graph.paged(task) if states[b].extent is None]

    def _needs_contents(self, task: Task, buffer: int) -> bool:
        """Tell whether the task uses contents of the buffer that exist already."""
        if buffer not in task.reads and buffer not in task.touches:
            return False
        return self._builder.states[buffer].is_on_host

    def _reserve(self, task: Task) -> bool:
        """Give extents to all missing buffers of a task, or to none; evict nothing."""
        missing = self._missing(task)
        if not self._unpacked.isdisjoint(missing) or (len(missing) > 1 and not self._fit(missing)):
            return False
        for buffer in missing:
            if not self.sim_malloc(buffer):
                assert len(missing) == 1, "they fit together"
                return False
            if self._needs_contents(task, buffer):
                self._builder.reload(buffer)
        return True

    def _fit(self, buffers: list[int]) -> bool:
        """Tell whether free memory has room for all of these buffers."""
        trial = self._blocks.copy()
        return all(trial.alloc(b, self._size(b)) is not None for b in buffers)

    def _force_all(self, task: Task) -> None:
        """Make a task's buffers resident, evicting any others."""
        protected = self._graph.paged(task)
        if not self._unpacked.isdisjoint(self._missing(task)):
            self._repack(task)
        for buffer in self._missing(task):
            if self._needs_contents(task, buffer):
                done = self.sim_malloc_force_reload(buffer, protected)
            else:
                done = self.sim_malloc_offload(buffer, protected)
            if not done:
                self._repack(task)
                return

    def _repack(self, task: Task) -> None:
        """Move a task's own buffers, because the missing ones do not fit between them.

        All buffers are evicted, and the task's are placed side by side. They fit if the working set
        does. The published algorithm does not cover this case. A large weight that is being
        unpacked is placed first, and then stays there.
        """
        own = self._graph.paged(task)
        offset = 0
        for block in list(self._blocks):
            if block.buffer is None:
                continue
            if block.buffer in self._unpacked and block.buffer in own and not block.offset:
                offset = self._size(block.buffer)
            else:
                self._evict(block.buffer)
        for buffer in sorted(self._missing(task), key=lambda b: b not in self._unpacked):
            extent = Extent(offset, self._size(buffer))
            self._builder.alloc(buffer, extent, self._blocks.alloc_at(buffer, extent))
            if self._needs_contents(task, buffer):
                self._builder.reload(buffer)
            offset = extent.end

    def _simulate(self, task: Task) -> bool:
        """Execute a task in the simulation; return whether memory became free."""
        self._builder.compute(task)
        freed = False
        for buffer in self._graph.paged(task):
            while (
                self._position[buffer] < len(self._uses[buffer])
                and self._uses[buffer][self._position[buffer]] <= task.index
            ):
                self._position[buffer] += 1
            if self._position[buffer] < len(self._uses[buffer]):
                continue
            held = self._graph.buffers[buffer]
            if not self._graph.can_be_kept(held) or buffer in self._streamed:
                self._blocks.free(buffer, self._builder.drop(buffer))
                freed = True
        return freed


def _large_unpacked_weights(problem: Problem) -> frozenset[int]:
    """Return the weights that are unpacked slice by slice and take more than half of the arena."""
    touched = {b for task in problem.graph.tasks for b in task.touches}
    found = unpacked_buffers(problem.graph) & touched
    return frozenset(b for b in found if 2 * problem.size(b) > problem.arena_bytes)


def plan_horizon(problem: Problem) -> MemGraph:
    """Plan by the published algorithm, variant ``working_set``."""
    return HorizonPlanner(problem, policy="horizon").plan_working_set()


def plan_horizon_published(problem: Problem) -> MemGraph:
    """Plan by variant ``working_set`` without two of the repairs; see the departures."""
    return HorizonPlanner(problem, policy=PUBLISHED, copies_clean=True).plan_working_set()
