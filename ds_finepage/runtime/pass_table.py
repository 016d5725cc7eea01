"""The passes of an attached model, found by the calls that select them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ds_finepage.capture.dynamo_graph import DynamoGraph
from ds_finepage.capture.recording import Bucket, Recordings, record
from ds_finepage.errors import CaptureError, PlanInfeasibleError
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.runtime.pass_maker import PassMaker
from ds_finepage.runtime.passes import Pass
from ds_finepage.runtime.settings import RunSettings
from ds_finepage.runtime.stats import Counters

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
        self._recordings: dict[DynamoGraph, Recordings] = {}
        self._library_bytes = maker.meter.library_bytes  # that the passes count

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

    def candidates(
        self, graph: DynamoGraph, args: Sequence[Any], settings: RunSettings
    ) -> Iterator[Pass | None]:
        """Yield the passes that may serve a call, one after the other, until one has room.

        The pass of a bucket of sizes comes first, and a pass for exactly the call's sizes second.
        None stands for a run without a plan.

        Args:
            graph: The graph that is called.
            args: The arguments.
            settings: The settings of now.

        Raises:
            PlanInfeasibleError: The call is new and has no room in the budget.
        """
        exact = (graph, *(args[i] for i in graph.key_positions))
        captures: list[tuple[tuple[Any, ...], Bucket | None]] = [(exact, None)]
        if exact not in self._passes:
            if graph not in self._recordings:
                self._recordings[graph] = Recordings(graph)
            bucket = self._recordings[graph].bucket_of(args, self.maker.strides_of(settings))
            if bucket is not None:
                self._counters.num_captures += bucket.is_new
                captures.insert(0, ((graph, *bucket.key), bucket))
        for key, bucket in captures:
            if key not in self._passes:
                try:
                    if bucket is None:
                        taskgraph = record(graph, args, strides_of=self.maker.strides_of(settings))
                    else:
                        taskgraph = bucket.recording.at(bucket.sizes)
                        self.maker.require_room(taskgraph, settings)  # measuring takes room
                    found = self.maker.size(taskgraph, settings)
                    self.count_library()
                    self._in_order.append(found)
                    self._passes[key] = found
                    self._counters.num_captures += bucket is None
                except PlanInfeasibleError:
                    if bucket is None:
                        raise
                    continue  # the exact sizes may still have room
                except CaptureError as error:
                    self._on_unplanned(str(error))
                    self._passes[key] = None
                self._forget_oldest()
            self._passes.move_to_end(key)
            yield self._passes[key]

    def _forget_oldest(self) -> None:
        while len(self._passes) > MAX_PASSES:
            _, oldest = self._passes.popitem(last=False)
            if oldest is None:
                continue
            self._in_order.remove(oldest)
            self._counters.num_forgotten += 1
            for other in self._in_order:
                if other.alternating is oldest:
                    other.forget_alternating()

    def measured(self, graph: TaskGraph, settings: RunSettings) -> TaskGraph:
        """Return a taskgraph with the costs of its ops, measured where they are not known.

        Args:
            graph: The taskgraph.
            settings: The settings of now.
        """
        found = self.maker.measured(graph, settings)
        self.count_library()
        return found

    def count_library(self) -> None:
        """Count in every pass the device bytes that libraries took for good since the last time."""
        grown = self.maker.meter.library_bytes - self._library_bytes
        self._library_bytes += grown
        if grown:
            for found in self._in_order:
                found.add_non_arena_bytes(grown)
