"""Predicts plans with a ring before they are written.

Most plans that a search tries are slower than the best one. Their nodes and edges are never used
but to predict their time. In the order of its nodes a ring decides when each reload may begin, so
the time follows from the slices alone.

Invariant: a forecast is exactly the time that the simulator predicts for the written plan, and the
bytes that it moves. Passes that need more of the simulator have no forecast: those that choose
experts, run on several ranks, or run where a lane slows another down.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import Extent, Lane, MemGraph
from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import JOIN, TO_HOST, BufferKind, TaskGraph
from ds_finepage.planning.finepage.choices import Selection
from ds_finepage.planning.finepage.residency import WeightClasses
from ds_finepage.planning.finepage.ring import Ring
from ds_finepage.planning.layout import Tenancy, top_of
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.split import Divisible, costs_of_part
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
    write: Callable[[], MemGraph]

    @cached_property
    def plan(self) -> MemGraph:
        """The written plan."""
        return self.write()


Plan = MemGraph | Forecast
"""A plan, written or not."""


def moved_bytes(plan: Plan) -> int:
    """Return the bytes that a pass copies between host and device."""
    if isinstance(plan, Forecast):
        return plan.moved_bytes
    return plan.reloaded_bytes + plan.offloaded_bytes


def written(plan: Plan) -> MemGraph:
    """Return a plan, and write it first if need be."""
    return plan.plan if isinstance(plan, Forecast) else plan


@dataclass(slots=True, eq=False)
class _Piece:
    """A weight, or a slice of one, on its way through the ring."""

    buffer: int
    nbytes: int
    extent_bytes: int
    num_copies: int = 1
    last: int = 0  # the last step that uses it
    at: int = 0  # its place among all pieces
    extent: Extent | None = None
    loaded_ns: int = 0


class _Part(enum.Enum):
    """The part of a task that a step is."""

    WHOLE = enum.auto()
    SLICE = enum.auto()
    JOIN = enum.auto()


@dataclass(slots=True)
class _Step:
    """A task of the cut pass."""

    task: int  # of the pass before it was cut
    part: _Part
    took_ns: int
    used: Sequence[_Piece] = ()


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
        return end_ns


class Forecaster:
    """Predicts plans of one pass that differ in their ring and in the bytes that they keep."""

    def __init__(self, weights: WeightClasses, placed: Mapping[int, Extent]) -> None:
        """Look at the parts of the pass that all plans share.

        Args:
            weights: The weights of a pass for which :func:`can_forecast` is true.
            placed: The extents of its activations.
        """
        graph, profile = weights.problem.graph, weights.problem.profile
        assert profile is not None
        self._weights, self._graph, self._profile = weights, graph, profile
        self._lower_bytes = top_of(placed)
        self._costs = Costs(profile)
        self._tasks_ns = [self._costs.task_ns(graph, task) for task in graph.tasks]
        self._parts_ns: dict[tuple[int, int], int] = {}  # task and rows -> time
        self._cut_by = {d.task: d for d in weights.divisible.values()}
        self._rows = [b.id for b in graph.buffers if b.gather is not None and b.id in placed]
        self._rows_used = self._used_among(set(self._rows))
        self._whole = self._used_among(set(weights.order) - weights.divisible.keys())
        self._plain = [_Step(at, _Part.WHOLE, time_ns) for at, time_ns in enumerate(self._tasks_ns)]
        self._copies = _Copies(graph, placed)

    def _used_among(self, buffers: Set[int]) -> list[tuple[int, ...]]:
        """List those of some buffers that each task uses."""
        graph = self._graph
        return [tuple(b for b in graph.paged(t) if b in buffers) for t in graph.tasks]

    def forecast(
        self, selection: Selection, ring_bytes: int, write: Callable[[], MemGraph]
    ) -> Forecast | None:
        """Predict a plan.

        Args:
            selection: The bytes that are kept.
            ring_bytes: The least length of the ring.
            write: Writes the plan.

        Returns:
            None if the kept weights or a streamed one do not fit.
        """
        ring_bytes = self._length_of_ring(selection, ring_bytes)
        if ring_bytes < 0:
            return None
        steps, pieces = self._steps(selection)
        total_ns = self._run(steps, pieces, ring_bytes)
        if total_ns is None:
            return None
        moved = sum(self._graph.buffers[b].nbytes for b in self._rows)
        return Forecast(total_ns, moved + sum(p.nbytes for p in pieces), write)

    def _length_of_ring(self, selection: Selection, least_bytes: int) -> int:
        """Return the bytes between activations and kept weights; negative if they are too few."""
        weights, kept = self._weights, self._weights.fixed_bytes
        for buffer in weights.order:
            if buffer in selection.kept_rows:
                rows, weight = selection.kept_rows[buffer], weights.divisible[buffer]
                if rows:
                    kept += weights.slice_bytes(weight, rows)
            elif buffer in selection.kept and buffer not in weights.per_call:
                kept += weights.sizes[buffer]
        if not kept:
            return least_bytes
        room = weights.problem.top - kept - self._lower_bytes
        return room if room >= least_bytes else -1

    def _steps(self, selection: Selection) -> tuple[list[_Step], list[_Piece]]:
        """List the tasks of the cut pass, and its pieces in the order in which they stream."""
        steps: list[_Step] = []
        pieces: list[_Piece] = []
        whole: dict[int, _Piece] = {}
        for index, plain in enumerate(self._plain):
            streamed = [b for b in self._whole[index] if b not in selection.kept]
            parts = self._parts(index, selection)
            if not streamed and not parts:
                steps.append(plain)
                continue
            for took_ns, new in parts or [(plain.took_ns, [])]:
                used = [*new]
                for buffer in streamed:
                    if buffer not in whole:
                        nbytes = self._graph.buffers[buffer].nbytes
                        whole[buffer] = _Piece(buffer, nbytes, self._weights.sizes[buffer])
                        new.append(whole[buffer])
                    used.append(whole[buffer])
                pieces += sorted(new, key=lambda piece: piece.buffer)
                for piece in used:
                    piece.last = len(steps)
                part = _Part.SLICE if len(parts) > 1 else _Part.WHOLE
                steps.append(_Step(index, part, took_ns, used))
            if len(parts) > 1:
                steps.append(_Step(index, _Part.JOIN, 0))
        return steps, pieces

    def _parts(self, index: int, selection: Selection) -> list[tuple[int, list[_Piece]]]:
        """List the parts of a product: the time of each, and the pieces of its matrix that stream.

        Returns:
            An empty list for another task.
        """
        weight = self._cut_by.get(index)
        if weight is None or weight.buffer not in selection.starts:
            return []
        starts, kept_rows = selection.starts[weight.buffer], selection.kept_rows[weight.buffer]
        return [
            (
                self._part_ns(index, end - start, weight.num_rows),
                self._pieces(weight, start, end) if start >= kept_rows else [],
            )
            for start, end in pairwise((*starts, weight.num_rows))
        ]

    def _pieces(self, weight: Divisible, start: int, end: int) -> list[_Piece]:
        """Return the slices of some rows; new buffers come behind those of the pass."""
        found = []
        for buffer, row_bytes in weight.parts:
            nbytes = (end - start) * row_bytes
            number = buffer if not start else len(self._graph.buffers)
            # A slice of experts takes rows of each of their matrices.
            num_copies = 1 if end - start == weight.num_rows else weight.num_matrices
            found.append(_Piece(number, nbytes, self._weights.aligned(nbytes), num_copies))
        return found

    def _part_ns(self, index: int, num_rows: int, of_rows: int) -> int:
        """Return the time of the part of a product that some rows of its matrix make."""
        if num_rows == of_rows:
            return self._tasks_ns[index]
        found = self._parts_ns.get((index, num_rows))
        if found is None:
            task = self._graph.tasks[index]
            costs: dict[str, Any] = costs_of_part(task, num_rows, of_rows)
            found = self._costs.task_ns(self._graph, dataclasses.replace(task, **costs))
            self._parts_ns[index, num_rows] = found
        return found

    def _run(self, steps: list[_Step], pieces: list[_Piece], ring_bytes: int) -> int | None:
        """Return when the pass ends; None if the ring is too small for a task."""
        lanes, ring, tenancy = _Lanes(self._profile), Ring(0, ring_bytes), Tenancy()
        copies, contents = self._copies, self._copies.begin()
        num_loaded = 0
        rows_ns: dict[int, int] = {}
        for buffer in self._rows:
            took_ns = self._costs.copy_ns(Lane.H2D, self._graph.buffers[buffer].nbytes)
            rows_ns[buffer] = lanes.run(Lane.H2D, 0, took_ns)
        for index, step in enumerate(steps):
            for at in range(num_loaded, len(pieces)):
                piece = pieces[at]
                extent = ring.take(at, piece.extent_bytes)
                if extent is None:
                    break
                # The pieces that had these bytes are free once their last task is complete.
                vacated_ns = max(tenancy.vacators(extent), default=0)
                took_ns = self._costs.copy_ns(Lane.H2D, piece.nbytes, piece.num_copies)
                piece.loaded_ns = lanes.run(Lane.H2D, vacated_ns, took_ns, piece.num_copies)
                piece.at, piece.extent, num_loaded = at, extent, at + 1
            ready_ns = copies.ready_ns(contents, step.task)
            for buffer in self._rows_used[step.task]:
                ready_ns = max(ready_ns, rows_ns[buffer])
            for piece in step.used:
                if piece.extent is None:
                    return None
                ready_ns = max(ready_ns, piece.loaded_ns)
            done_ns = lanes.run(copies.lane_of(step.task), ready_ns, step.took_ns)
            copies.finish(contents, step, done_ns)
            for piece in step.used:
                if piece.last == index and piece.extent is not None:
                    ring.give_back(piece.at)
                    tenancy.free(piece.extent, done_ns)
        return lanes.end_ns


@dataclass(slots=True)
class _Contents:
    """The contents of a buffer that a copy to host memory reads or writes."""

    made_ns: int = 0  # the task that made them is complete
    read_ns: int = 0  # the tasks that have read them are
    used_ns: int = 0  # all tasks that have used the buffer are


@dataclass(slots=True)
class _CopyTask:
    """A task that waits for copies to host memory, or that they wait for.

    Attributes:
        reads: The buffers of copies that it only reads.
        changes: Those that it writes, as a whole or in part.
        makes: Those whose contents are complete after it.
        takes_from: Those whose bytes its results get.
    """

    reads: tuple[int, ...]
    changes: tuple[int, ...]
    makes: tuple[int, ...]
    takes_from: tuple[int, ...]


class _Copies:
    """When tasks may run in a pass that copies to host memory beside its other tasks.

    Tasks on the device run one after another, so they never wait for each other. They wait for the
    copies that read what they overwrite, and for those that read the former contents of their
    bytes. A copy waits for the task that made what it reads.
    """

    def __init__(self, graph: TaskGraph, placed: Mapping[int, Extent]) -> None:
        copies = {task.index for task in graph.tasks if task.op == TO_HOST}
        self._buffers = {b for index in copies for b in graph.buffers_of[index]}
        self._copies = copies
        self._tasks: dict[int, _CopyTask] = {}
        if not copies:
            return
        takes_from = self._takes_from(graph, placed)
        for task in graph.tasks:
            used = [b for b in graph.buffers_of[task.index] if b in self._buffers]
            makes = task.reads if task.op == JOIN else task.writes
            changes = {*makes, *task.touches}
            if used or takes_from[task.index]:
                self._tasks[task.index] = _CopyTask(
                    reads=tuple(b for b in used if b not in changes),
                    changes=tuple(b for b in used if b in changes),
                    makes=tuple(b for b in used if b in makes),
                    takes_from=takes_from[task.index],
                )

    def _takes_from(self, graph: TaskGraph, placed: Mapping[int, Extent]) -> list[tuple[int, ...]]:
        """List the buffers of copies whose bytes the results of each task get.

        Held activations count as if they were freed at their last use: nothing else has their bytes
        while they stay.
        """
        tenancy, uses, found = Tenancy(), graph.uses, []
        has_bytes = {b for b in placed if graph.buffers[b].gather is not None}
        for task in graph.tasks:
            used = [b for b in graph.paged(task) if b in placed]
            new = [b for b in used if b not in has_bytes]
            has_bytes.update(new)
            former = {v for b in new for v in tenancy.vacators(placed[b])}
            found.append(tuple(sorted(former & self._buffers)))
            for buffer in used:
                if uses[buffer][-1] == task.index:
                    tenancy.free(placed[buffer], buffer)
        return found

    def begin(self) -> dict[int, _Contents]:
        """Begin a pass."""
        return {buffer: _Contents() for buffer in self._buffers}

    def lane_of(self, task: int) -> Lane:
        """Return the lane of a task."""
        return Lane.D2H if task in self._copies else Lane.COMPUTE

    def ready_ns(self, contents: Mapping[int, _Contents], index: int) -> int:
        """Return when a task may begin, as far as copies are concerned."""
        task = self._tasks.get(index)
        if task is None:
            return 0
        return max(
            0,
            *(contents[b].used_ns for b in task.takes_from),
            *(contents[b].made_ns for b in (*task.reads, *task.changes)),
            *(contents[b].read_ns for b in task.changes),
        )

    def finish(self, contents: Mapping[int, _Contents], step: _Step, done_ns: int) -> None:
        """Note when a step is complete."""
        task = self._tasks.get(step.task)
        if task is None:
            return
        for buffer in task.changes:
            contents[buffer].used_ns = max(contents[buffer].used_ns, done_ns)
        for buffer in task.makes if step.part is not _Part.SLICE else ():
            contents[buffer].made_ns, contents[buffer].read_ns = done_ns, 0
        for buffer in task.reads if step.part is not _Part.JOIN else ():
            contents[buffer].used_ns = max(contents[buffer].used_ns, done_ns)
            contents[buffer].read_ns = max(contents[buffer].read_ns, done_ns)


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
