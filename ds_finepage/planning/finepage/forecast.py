"""Predicts plans with a ring before they are written.

Most plans that a search tries are slower than the best one. Their nodes and edges are never used
but to predict their time. In the order of its nodes a ring decides when each reload may begin, so
the time follows from the cut pass alone.

Invariant: a forecast is exactly the time that the simulator predicts for the written plan, and the
bytes that it moves. Passes that need more of the simulator have no forecast: those that choose
experts, or run on several ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import Extent, Lane, MemGraph
from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import JOIN, TO_HOST, BufferKind, Task, TaskGraph
from ds_finepage.planning.finepage.choices import Choice
from ds_finepage.planning.finepage.ring import Ring
from ds_finepage.planning.finepage.small_arena import weights_by_first_use
from ds_finepage.planning.layout import Tenancy, top_of
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.simulator import Costs


@dataclass(frozen=True)
class Forecast:
    """A plan that is written when it is wanted.

    Attributes:
        total_ns: The time of a pass.
        moved_bytes: The bytes that a pass reloads.
        write: Writes the plan.
    """

    total_ns: int
    moved_bytes: int
    write: Callable[[], MemGraph | None]

    @cached_property
    def plan(self) -> MemGraph:
        """The written plan."""
        found = self.write()
        assert found is not None, "a plan with a forecast fits"
        return found


Plan = MemGraph | Forecast
"""A plan, written or not."""


class _Lanes:
    """The times at which the host and the lanes are free, as in the simulator."""

    def __init__(self, profile: HardwareProfile) -> None:
        self._profile = profile
        self._issued_ns = 0
        self._free_ns = dict.fromkeys(Lane, 0)

    @property
    def end_ns(self) -> int:
        """When the last node is complete."""
        return max(self._free_ns.values())

    def run(self, lane: Lane, ready_ns: int, took_ns: int, num_copies: int = 1) -> int:
        """Run the next node of a lane; return when it is complete.

        Args:
            lane: The lane.
            ready_ns: When its last predecessor is complete.
            took_ns: The time that it takes.
            num_copies: The copies of a reload.
        """
        if lane is Lane.H2D:
            self._issued_ns += self._profile.host_copy_ns * num_copies
        else:  # a task, also one that copies to host memory
            self._issued_ns += self._profile.host_op_ns
        end_ns = max(ready_ns, self._free_ns[lane], self._issued_ns) + took_ns
        self._free_ns[lane] = end_ns
        if lane is Lane.HOST:
            self._issued_ns = max(self._issued_ns, end_ns)
        return end_ns


class Forecaster:
    """Predicts plans of one pass that differ in their ring and in the bytes that they keep."""

    def __init__(self, problem: Problem, placed: Mapping[int, Extent]) -> None:
        """Take what all plans share: a pass with forecasts, the extents of its activations."""
        assert problem.profile is not None
        self._problem, self._placed, self._profile = problem, placed, problem.profile
        self._costs = Costs(problem.profile)
        self._rows = [
            b.id for b in problem.graph.buffers if b.gather is not None and b.id in placed
        ]
        copies = any(task.op == TO_HOST for task in problem.graph.tasks)
        self._has_lanes = copies or bool(problem.graph.host_tasks)

    def forecast(
        self, choice: Choice, ring_bytes: int, write: Callable[[], MemGraph | None]
    ) -> Forecast | None:
        """Predict a plan.

        Args:
            choice: The cut pass, and the weights that stream through it.
            ring_bytes: The least length of the ring.
            write: Writes the plan.

        Returns:
            None if the kept weights or a streamed one do not fit.
        """
        graph, streamed = choice.graph, choice.streamed
        streams, cut = set(streamed), self._problem.of(graph)
        kept = sum(cut.size(b) for b in weights_by_first_use(graph) if b not in streams)
        if kept:
            room = cut.top - kept - top_of(self._placed)
            if room < ring_bytes:
                return None
            ring_bytes = room
        total_ns = self._run(graph, streamed, ring_bytes)
        if total_ns is None:
            return None
        moved = sum(graph.buffers[b].nbytes for b in (*self._rows, *streamed))
        return Forecast(total_ns, moved, write)

    def _run(self, graph: TaskGraph, streamed: Sequence[int], ring_bytes: int) -> int | None:
        """Return when the pass ends; None if the ring is too small for a task."""
        lanes, ring, tenancy = _Lanes(self._profile), Ring(0, ring_bytes), Tenancy()
        waits = _Waits(graph, self._placed) if self._has_lanes else None
        size, uses = self._problem.of(graph).size, graph.uses
        waiting, streams, extents = deque(streamed), set(streamed), dict[int, Extent]()
        loaded_ns = {b: self._reload(lanes, graph, b, 0) for b in self._rows}
        for task in graph.tasks:
            for buffer, extent in ring.take_ahead(waiting, size):
                # The weights that had these bytes are free once their last task is complete.
                vacated_ns = max(tenancy.vacators(extent), default=0)
                extents[buffer] = extent
                loaded_ns[buffer] = self._reload(lanes, graph, buffer, vacated_ns)
            paged = graph.paged(task)
            ready_ns = waits.ready_ns(task) if waits else 0
            for buffer in paged:
                if buffer in loaded_ns:
                    ready_ns = max(ready_ns, loaded_ns[buffer])
                elif buffer in streams:
                    return None
            lane = Lane.D2H if task.op == TO_HOST else Lane.COMPUTE
            lane = Lane.HOST if task.index in graph.host_tasks else lane
            done_ns = lanes.run(lane, ready_ns, self._costs.task_ns(graph, task))
            if waits:
                waits.finish(task, done_ns)
            for buffer in paged:
                if buffer in extents and uses[buffer][-1] == task.index:
                    ring.give_back(buffer)
                    tenancy.free(extents[buffer], done_ns)
        return lanes.end_ns

    def _reload(self, lanes: _Lanes, graph: TaskGraph, buffer: int, ready_ns: int) -> int:
        """Reload a weight; return when it is there."""
        weight = graph.buffers[buffer]
        num_copies = graph.num_pieces(weight)
        took_ns = self._costs.copy_ns(Lane.H2D, weight.nbytes, num_copies)
        return lanes.run(Lane.H2D, ready_ns, took_ns, num_copies)


class _Waits:
    """When tasks may run in a pass with tasks in several lanes.

    A task waits for those that made what it reads, for those that read what it overwrites, and for
    those that used the former contents of its bytes. Touches wait for no other touch, and a join
    need not: the device makes them in order, and the host issues nothing before its own are done.
    """

    def __init__(self, graph: TaskGraph, placed: Mapping[int, Extent]) -> None:
        self._graph, self._placed = graph, placed
        self._has_bytes = {b for b in placed if graph.buffers[b].gather is not None}
        self._tenancy = Tenancy()
        self._made_ns: dict[int, int] = {}
        self._read_ns: dict[int, int] = {}

    def ready_ns(self, task: Task) -> int:
        """Return when a task may begin, as far as other tasks are concerned."""
        joined = self._joined(task)
        ready_ns = 0
        for buffer in task.buffers:
            ready_ns = max(ready_ns, self._made_ns.get(buffer, 0))
        for buffer in (*task.writes, *task.touches, *joined):
            ready_ns = max(ready_ns, self._read_ns.get(buffer, 0))
        for buffer in self._graph.paged(task):
            if buffer in self._placed and buffer not in self._has_bytes:
                # Held activations count as if they were freed at their last use: nothing else has
                # their bytes while they stay.
                self._has_bytes.add(buffer)
                vacated_ns = max(self._tenancy.vacators(self._placed[buffer]), default=0)
                self._made_ns[buffer] = vacated_ns
                ready_ns = max(ready_ns, vacated_ns)
        return ready_ns

    def finish(self, task: Task, done_ns: int) -> None:
        """Note when a task is complete."""
        for buffer in task.reads:
            self._read_ns[buffer] = max(done_ns, self._read_ns.get(buffer, 0))
        for buffer in (*task.writes, *self._joined(task)):
            self._made_ns[buffer] = done_ns
        for buffer in self._graph.paged(task):
            if buffer in self._placed and self._graph.uses[buffer][-1] == task.index:
                last_ns = max(done_ns, self._read_ns.get(buffer, 0))
                self._tenancy.free(self._placed[buffer], last_ns)

    @staticmethod
    def _joined(task: Task) -> tuple[int, ...]:
        return task.reads if task.op == JOIN else ()


def can_forecast(problem: Problem) -> bool:
    """Tell whether plans of a pass can be predicted before they are written."""
    graph = problem.graph
    if problem.profile is None or problem.shared or routes(graph):
        return False
    copied = [task for task in graph.tasks if task.op == TO_HOST]
    kinds = {graph.buffers[b].kind for task in copied for b in task.buffers}
    return (
        graph.num_ranks == 1
        and not graph.experts
        and kinds <= {BufferKind.ACTIVATION, BufferKind.HOST}
    )
