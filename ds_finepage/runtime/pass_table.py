"""From the calls of Dynamo's graphs to the passes that are planned."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ds_finepage.capture.dynamo_graph import DynamoGraph, Recording
from ds_finepage.errors import CaptureError, PlanInfeasibleError
from ds_finepage.execution.executor import Executor
from ds_finepage.execution.layouts import LayoutProbe
from ds_finepage.execution.measure import OpMeter
from ds_finepage.execution.meter import free_profiler
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.budget import HOST_PROGRAM_SLACK_BYTES, non_arena_bytes
from ds_finepage.planning.pipeline import Needs, needs_of
from ds_finepage.runtime.stats import PassStats, Stats

logger = logging.getLogger(__name__)

MAX_RECORDINGS = 8
"""Recordings of one graph for ranges of sizes; beyond, each shape is captured by itself."""

UNPLANNED_SHARE = 2
"""Activations that nobody places: at most this many times those that are live at once. PyTorch
frees what a composite op made when the op returns, a plan when it was used last."""

FEW_HELD_BYTES = HOST_PROGRAM_SLACK_BYTES // 2
"""What earlier passes have left on the device does not count by itself up to here."""

MAX_PASSES = 128
"""Passes that are remembered; beyond, the one that was not used for longest is forgotten."""


@dataclass
class Pass:
    """One captured shape: its plan, and its executor while the arena it was built on exists."""

    graph: TaskGraph
    stats: PassStats
    memgraph: MemGraph | None = None
    executor: Executor | None = None
    num_entries: int = 0  # runs that followed another pass
    neighbour: Pass | None = None  # the pass whose kept weights this one leaves in place
    resident_bytes: int = 0  # under a budget of this, all of the model may be on the device
    held_bytes: int = 0  # on the device while it runs, and not given to it
    extra_workspace_bytes: int = 0  # beyond that of the captured tasks, where plans cut them

    @cached_property
    def _seen_inputs(self) -> list[int]:
        kinds = (BufferKind.INPUT, BufferKind.STATE)
        return [i.position for i in self.graph.inputs if self._kind_of(i.tensor) in kinds]

    @cached_property
    def _seen_outputs(self) -> list[int]:
        return [
            at
            for at, output in enumerate(self.graph.outputs)
            if output.tensor is not None and self._kind_of(output.tensor) is BufferKind.OUTPUT
        ]

    def _kind_of(self, tensor: int) -> BufferKind:
        return self.graph.buffers[self.graph.tensors[tensor].buffer].kind

    def given(self, args: Sequence[Any]) -> list[Any]:
        """Return the device tensors among a call's arguments, but for the weights."""
        return [args[position] for position in self._seen_inputs]

    def made(self, results: Sequence[Any]) -> list[Any]:
        """Return the device tensors among what a call returns."""
        return [results[at] for at in self._seen_outputs]

    def has_room(self, held_bytes: int, budget_bytes: int) -> bool:
        """Tell whether the pass can run while so much is held, and not given to it."""
        counted = held_bytes if held_bytes > FEW_HELD_BYTES else 0
        return self.stats.min_budget_bytes - self.held_bytes + counted <= budget_bytes

    def leave_room(self, held_bytes: int, budget_bytes: int) -> None:
        """Leave room for what others were given or have made; it is planned anew if that is more.

        Args:
            held_bytes: Bytes that are on the device while it runs, and not given to it.
            budget_bytes: The budget. Within it some more room is left, since a plan for each of
                many tensors is too many; and where it is too small, what is not needed any more is
                taken back.
        """
        wanted = held_bytes if held_bytes > FEW_HELD_BYTES else 0
        if wanted > self.held_bytes:
            ample = max(wanted, self.held_bytes * 5 // 4)
            wanted = ample if self.has_room(ample, budget_bytes) else wanted
        elif wanted == self.held_bytes or self.has_room(self.held_bytes, budget_bytes):
            return
        more = wanted - self.held_bytes
        self.held_bytes += more
        self.resident_bytes += more
        self.stats.add_around(more)
        self.executor = self.memgraph = None

    @property
    def is_visitor(self) -> bool:
        """True where most runs followed another pass."""
        return 2 * self.num_entries > self.stats.num_runs


class Captures:
    """The passes of an attached model, captured as calls come.

    Attributes:
        costs: What ops take on this device.
        passes: By what selects them, the one that was used last at the end; None where a call has
            to run without a plan.
        all_weights_bytes: What the whole model takes on the device.
        most_resident_bytes: Budget under which, for every pass so far, all of the model may be on
            the device.
    """

    def __init__(
        self,
        stats: Stats,
        costs: OpMeter,
        *,
        alignment: int,
        all_weights_bytes: int,
        may_cut: Callable[[], bool],
        make_room: Callable[[], None],
    ) -> None:
        """Start with nothing captured.

        Args:
            stats: Counters to keep.
            costs: What ops take on this device.
            alignment: Of extents, in bytes.
            all_weights_bytes: What the whole model takes on the device.
            may_cut: Tells whether plans may cut weights now.
            make_room: Gives the arena back, before something is measured.
        """
        self.costs = costs
        self.passes: OrderedDict[tuple[Any, ...], Pass | None] = OrderedDict()
        self._recordings: dict[int, list[Recording]] = {}
        self.most_resident_bytes = 0
        self._of_one_size: set[int] = set()  # graphs that cannot be recorded with symbols
        self._stats = stats
        self._alignment = alignment
        self.all_weights_bytes = all_weights_bytes
        self._may_cut = may_cut
        self._make_room = make_room
        self._strides_of = LayoutProbe(make_room=self._room_bytes)

    def planned(self) -> list[Pass]:
        """List the passes that have a plan or will."""
        return [p for p in self.passes.values() if p is not None]

    def forget(self) -> None:
        """Forget everything but what ops take."""
        self.passes.clear()
        self._recordings.clear()
        self._of_one_size.clear()
        self.most_resident_bytes = 0
        self._stats.passes.clear()

    def warn_unplanned(self, reason: str) -> None:
        """Say that something runs without a plan, and why."""
        logger.warning("running without a plan: %s", reason)
        self._stats.unplanned_reasons.append(reason)

    def find(self, index: int, graph: DynamoGraph, args: Sequence[Any]) -> Pass | None:
        """Return the pass of a call, captured if it is new; None where it runs without a plan."""
        key = (index, graph.key_of(args))
        if key in self.passes:
            self.passes.move_to_end(key)
            return self.passes[key]
        recording = self._recording(index, graph, args)
        if recording is not None:
            sizes = recording.upper_end(recording.values_of(args))
            deciding = tuple(v for n, v in sizes.items() if n in recording.deciding)
            key_of_many = (index, id(recording), deciding, graph.fixed_key_of(args))
            if key_of_many in self.passes:
                self.passes.move_to_end(key_of_many)
                return self.passes[key_of_many]
            try:
                taskgraph = recording.at(sizes)
                self._require_room(taskgraph)  # before measuring, which needs room itself
                return self._remember(key_of_many, self._prepare(taskgraph))
            except PlanInfeasibleError:
                pass  # there may be room for this very call
            except CaptureError as error:
                self.warn_unplanned(str(error))
                return self._remember(key_of_many, None)
        return self._remember(key, self._capture(graph, args))

    def find_exact(self, index: int, graph: DynamoGraph, args: Sequence[Any]) -> Pass | None:
        """Capture a call by itself, where the pass that :meth:`find` gave has no room for it."""
        return self._remember((index, graph.key_of(args)), self._capture(graph, args))

    def _remember(self, key: tuple[Any, ...], found: Pass | None) -> Pass | None:
        self.passes[key] = found
        while len(self.passes) > MAX_PASSES:
            _, oldest = self.passes.popitem(last=False)
            for other in self.planned():
                if other.neighbour is oldest:
                    other.neighbour = None
            if oldest is not None:
                self._stats.passes.remove(oldest.stats)
                self._stats.num_forgotten += 1
        return found

    def _room_bytes(self) -> int:
        """Give the arena back; return what that leaves for scratch tensors."""
        self._make_room()
        return self._stats.budget_bytes - self.costs.library_bytes

    def _recording(self, index: int, graph: DynamoGraph, args: Sequence[Any]) -> Recording | None:
        """Return a recording that holds for a call's sizes and others; None where none does."""
        recordings = self._recordings.setdefault(index, [])
        for recording in recordings:
            if recording.admits(recording.values_of(args)):
                return recording
        if len(recordings) >= MAX_RECORDINGS or index in self._of_one_size:
            return None
        try:
            found = graph.record_lengths(args, strides_of=self._strides_of)
        except CaptureError as error:
            logger.info("each size of %s is captured by itself: %s", graph.name, error)
            found = None
        if found is None:
            self._of_one_size.add(index)
            return None
        recordings.append(found)
        self._stats.num_captures += 1
        return found

    def _capture(self, graph: DynamoGraph, args: Sequence[Any]) -> Pass | None:
        """Capture a shape; None where it has to run without a plan."""
        try:
            found = self._prepare(graph.record(args, strides_of=self._strides_of))
        except CaptureError as error:
            self.warn_unplanned(str(error))
            return None
        self._stats.num_captures += 1
        return found

    def _prepare(self, taskgraph: TaskGraph) -> Pass:
        """Measure a captured pass, and find out what it needs."""
        taskgraph = self.with_costs(taskgraph)
        needs = self._needs(taskgraph)
        stats = PassStats(
            name=taskgraph.name,
            num_tasks=len(taskgraph.tasks),
            arena_bytes=0,
            around_bytes=needs.non_arena_bytes,
            min_budget_bytes=needs.min_budget_bytes,
            needed_budget_bytes=needs.needed_budget_bytes,
        )
        if not self._may_cut():  # cutting may make room yet
            self._require_room(taskgraph)
        self._stats.passes.append(stats)
        mine = sum(
            -(-b.nbytes // self._alignment) * self._alignment
            for b in taskgraph.buffers
            if b.kind is BufferKind.WEIGHT
        )
        activations = needs.needed_arena_bytes - mine
        around = needs.non_arena_bytes
        resident = around + self.all_weights_bytes + UNPLANNED_SHARE * activations
        self.most_resident_bytes = max(self.most_resident_bytes, resident)
        return Pass(taskgraph, stats, resident_bytes=resident)

    def _require_room(self, graph: TaskGraph) -> None:
        """Refuse a captured pass of which no plan has room in the budget."""
        self._needs(graph).require_room(self._stats.budget_bytes)

    def _needs(self, graph: TaskGraph) -> Needs:
        return needs_of(
            graph,
            alignment=self._alignment,
            cuts_weights=self._may_cut(),
            library_bytes=self.costs.library_bytes,
        )

    def with_costs(self, graph: TaskGraph) -> TaskGraph:
        """Return a taskgraph with what its ops take, measured where that is not known yet."""
        before = self.costs.library_bytes
        around = non_arena_bytes(graph, self._alignment) + before
        outputs = sum(b.nbytes for b in graph.buffers if b.kind is BufferKind.OUTPUT)
        room_bytes = self._stats.budget_bytes - around + outputs  # which are not there yet
        if self.costs.knows_all(graph, room_bytes=room_bytes):
            return self.costs.with_costs(graph, room_bytes=room_bytes)
        self._make_room()  # the scratch tensors need its room
        with free_profiler():
            measured = self.costs.with_costs(graph, room_bytes=room_bytes)
        for found in self.planned():
            found.stats.add_around(self.costs.library_bytes - before)
        return measured

    def count_library(self, nbytes: int) -> None:
        """Count device bytes that libraries took while something else was measured."""
        self.costs.library_bytes += nbytes
        for found in self.planned():
            found.stats.add_around(nbytes)
