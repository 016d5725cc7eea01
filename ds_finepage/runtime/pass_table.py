"""The passes of an attached model, found by the calls that select them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ds_finepage.capture.dynamo_graph import Recording
from ds_finepage.errors import CaptureError, PlanInfeasibleError
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.runtime.pass_maker import GraphCall, PassMaker
from ds_finepage.runtime.passes import Pass
from ds_finepage.runtime.settings import RunSettings
from ds_finepage.runtime.stats import Counters

MAX_RECORDINGS = 8
"""Recordings of one graph for ranges of sizes; further shapes are captured one by one."""

MAX_PASSES = 128
"""Passes that are remembered; the table then forgets the one that was used longest ago."""


class PassTable:
    """Finds the pass of a call, and has it made where it is new.

    A call selects its pass by the graph and by what the recording depends on: a bucket of sizes
    where one recording serves many, else the exact shapes.

    Attributes:
        maker: Makes new passes.
    """

    def __init__(
        self, maker: PassMaker, counters: Counters, on_unplanned: Callable[[str], None]
    ) -> None:
        """Start empty.

        Args:
            maker: Makes new passes.
            counters: Counts captures and forgotten passes.
            on_unplanned: Called with the reason where a call must run without a plan.
        """
        self.maker = maker
        self._counters = counters
        self._on_unplanned = on_unplanned
        self._passes: OrderedDict[tuple[Any, ...], Pass | None] = OrderedDict()
        self._in_order: list[Pass] = []  # of their capture
        self._recordings: dict[int, list[Recording]] = {}
        self._of_one_size: set[int] = set()  # graphs that cannot be recorded for a range of sizes

    def __len__(self) -> int:
        """Return the number of remembered calls, unplanned ones included."""
        return len(self._passes)

    @property
    def passes(self) -> list[Pass]:
        """The remembered passes, in the order of their capture."""
        return list(self._in_order)

    def forget(self) -> None:
        """Forget every pass and every recording."""
        self._passes.clear()
        self._in_order.clear()
        self._recordings.clear()
        self._of_one_size.clear()

    def find(self, call: GraphCall, settings: RunSettings) -> Pass | None:
        """Return the pass of a call; None where the call runs without a plan.

        Args:
            call: The call.
            settings: The settings of now.

        Raises:
            PlanInfeasibleError: The call is new and has no room in the budget.
        """
        key = call.key()
        if key in self._passes:
            return self._used(key)
        recording = self._recording(call, settings)
        if recording is not None:
            sizes = recording.upper_end(recording.values_of(call.args))
            deciding = tuple(v for n, v in sizes.items() if n in recording.deciding)
            bucket = (call.index, id(recording), deciding, call.graph.fixed_key_of(call.args))
            if bucket in self._passes:
                return self._used(bucket)
            try:
                graph = recording.at(sizes)
                self.maker.require_room(graph, settings)  # before measuring, which takes room
                return self._remember(bucket, self._size(graph, settings))
            except PlanInfeasibleError:
                pass  # the exact sizes may still have room
            except CaptureError as error:
                self._on_unplanned(str(error))
                return self._remember(bucket, None)
        return self.find_exact(call, settings)

    def find_exact(self, call: GraphCall, settings: RunSettings) -> Pass | None:
        """Capture a call for exactly its sizes, where its bucket has no room.

        Args:
            call: The call.
            settings: The settings of now.

        Raises:
            PlanInfeasibleError: The call has no room in the budget.
        """
        try:
            found = self._size(self.maker.record(call, settings), settings)
        except CaptureError as error:
            self._on_unplanned(str(error))
            return self._remember(call.key(), None)
        self._counters.num_captures += 1
        return self._remember(call.key(), found)

    def measured(self, graph: TaskGraph, settings: RunSettings) -> TaskGraph:
        """Return a taskgraph with the costs of its ops, measured where they are not known.

        Args:
            graph: The taskgraph.
            settings: The settings of now.
        """
        found, library_bytes = self.maker.measured(graph, settings)
        self._count_library(library_bytes)
        return found

    def count_library(self, nbytes: int) -> None:
        """Count device bytes that libraries took for good while something else was measured."""
        self.maker.meter.library_bytes += nbytes
        self._count_library(nbytes)

    def _count_library(self, nbytes: int) -> None:
        for found in self._in_order:
            found.add_non_arena_bytes(nbytes)

    def _size(self, graph: TaskGraph, settings: RunSettings) -> Pass:
        return self.maker.size(self.measured(graph, settings), settings)

    def _used(self, key: tuple[Any, ...]) -> Pass | None:
        self._passes.move_to_end(key)
        return self._passes[key]

    def _remember(self, key: tuple[Any, ...], found: Pass | None) -> Pass | None:
        self._passes[key] = found
        if found is not None:
            self._in_order.append(found)
        while len(self._passes) > MAX_PASSES:
            _, oldest = self._passes.popitem(last=False)
            if oldest is None:
                continue
            self._in_order.remove(oldest)
            self._counters.num_forgotten += 1
            for other in self._in_order:
                if other.alternating is oldest:
                    other.forget_alternating()
        return found

    def _recording(self, call: GraphCall, settings: RunSettings) -> Recording | None:
        """Return a recording that holds for a call's sizes; None where there is none."""
        recordings = self._recordings.setdefault(call.index, [])
        for recording in recordings:
            if recording.admits(recording.values_of(call.args)):
                return recording
        if len(recordings) >= MAX_RECORDINGS or call.index in self._of_one_size:
            return None
        found = self.maker.record_range(call, settings)
        if found is None:
            self._of_one_size.add(call.index)
            return None
        recordings.append(found)
        self._counters.num_captures += 1
        return found
