"""The passes of an attached model, found by the calls that select them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ds_finepage.capture.dynamo_graph import DynamoGraph
from ds_finepage.capture.recording import Bucket, Recordings, record
from ds_finepage.errors import CaptureError, PlanInfeasibleError
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.runtime.pass_maker import PassMaker
from ds_finepage.runtime.passes import Habit, Pass
from ds_finepage.runtime.settings import RunSettings
from ds_finepage.runtime.stats import Counters

_Key = tuple[Any, ...]

MAX_TASKS = 1 << 18
"""Tasks of all passes that are remembered. Beyond, the table forgets the pass that was used longest
ago. A plan takes some kilobytes of host memory for each task: so a small model may have a thousand
passes, and one of 80 layers a hundred."""


class PassTable:
    """Finds the pass of a call, and has it made where it is new.

    A call selects its pass by the graph and by what the recording depends on: a bucket of sizes
    where one recording serves many, else the exact shapes.
    """

    def __init__(
        self, maker: PassMaker, counters: Counters, on_unplanned: Callable[[str], None]
    ) -> None:
        """Start empty; ``on_unplanned`` gets the reason where a call must run without a plan."""
        self.maker = maker
        self._counters = counters
        self._on_unplanned = on_unplanned
        self._passes: OrderedDict[tuple[Any, ...], Pass | None] = OrderedDict()
        self._in_order: list[Pass] = []  # of their capture
        self._recordings: dict[DynamoGraph, Recordings] = {}
        self._habits: dict[DynamoGraph, Habit] = {}
        # Bucket of sizes -> the part of it that had room, under these settings.
        self._longest: dict[_Key, tuple[Bucket, RunSettings]] = {}
        self._library_bytes = maker.meter.library_bytes  # that the passes count

    @property
    def passes(self) -> list[Pass]:
        """The remembered passes, in the order of their capture."""
        return list(self._in_order)

    def forget(self) -> None:
        """Forget every pass and every recording."""
        self._passes.clear()
        self._in_order.clear()
        self._recordings.clear()
        self._habits.clear()
        self._longest.clear()

    def candidates(
        self, graph: DynamoGraph, args: Sequence[Any], settings: RunSettings
    ) -> Iterator[Pass | None]:
        """Yield the passes that may serve a call, one after the other, until one has room.

        The pass of a bucket of sizes comes first. If the whole bucket has no room, a pass for the
        longest call with room follows, so that a growing cache needs no plan for each token. A pass
        for exactly the call's sizes is the last one. All of them are of one recording. None stands
        for a run without a plan.

        Raises:
            PlanInfeasibleError: The call is new and has no room in the budget.
        """
        if graph not in self._recordings:
            self._recordings[graph] = Recordings(graph)
        bucket = self._recordings[graph].bucket_of(args, self.maker.strides_of(settings))
        if bucket is None:
            exact = (graph, graph.sharing_of(args), *(args[i] for i in graph.key_positions))
            is_new, strides_of = exact not in self._passes, self.maker.strides_of(settings)
            found = self._find(exact, lambda: record(graph, args, strides_of=strides_of), settings)
            self._counters.num_captures += is_new and found is not None
            yield found
            return
        self._counters.num_captures += bucket.is_new
        of_bucket = (graph, *bucket.key)
        for sizes in self._sizes(graph, bucket, settings):
            chosen = bucket.for_sizes(sizes)
            try:
                found = self._of_sizes((graph, *chosen.key), chosen, settings)
            except PlanInfeasibleError:
                if sizes == bucket.values:
                    raise
                continue  # smaller sizes may still have room
            self._longest[of_bucket] = (chosen, settings)
            yield found

    def _sizes(
        self, graph: DynamoGraph, bucket: Bucket, settings: RunSettings
    ) -> Iterator[Mapping[str, int]]:
        """Yield the sizes for which a call may be planned; those with room so far come first."""
        key, values, recording = (graph, *bucket.key), bucket.values, bucket.recording
        longest, under = self._longest.get(key, (bucket, None))
        if under is not settings:
            longest = self._larger(bucket, settings)
        yield longest.sizes if longest.holds(values) else bucket.sizes
        if bucket.sizes != values:
            exact = bucket.for_sizes(values)
            self._of_sizes((graph, *exact.key), exact, settings)  # without room it ends here
            more = recording.room_to_grow(values, lambda g: self.maker.has_room(g, settings))
            while more:
                yield recording.grown(values, more)
                more //= 2
            yield values

    def _larger(self, bucket: Bucket, settings: RunSettings) -> Bucket:
        """Return a bucket that is planned, and has room for one that is not, or else that one."""
        planned = (other for other, under in self._longest.values() if under is settings)
        return next((other for other in planned if other.has_room_for(bucket)), bucket)

    def _of_sizes(self, key: _Key, bucket: Bucket, settings: RunSettings) -> Pass | None:
        def at_sizes() -> TaskGraph:
            taskgraph = bucket.recording.at(bucket.sizes)
            self.maker.require_room(taskgraph, settings)  # measuring takes room
            return taskgraph

        return self._find(key, at_sizes, settings)

    def _find(
        self, key: _Key, capture: Callable[[], TaskGraph], settings: RunSettings
    ) -> Pass | None:
        """Return the pass of a key; make it where it is new."""
        if key not in self._passes:
            try:
                found = self.maker.size(capture(), settings)
                self._count_library()
                found.habit = self._habits.setdefault(key[0], found.habit)
                self._in_order.append(found)
                self._passes[key] = found
            except CaptureError as error:
                key[0].release_buffers(error.weights)
                self._on_unplanned(str(error))
                self._passes[key] = None
            self._forget_oldest()
        self._passes.move_to_end(key)
        return self._passes[key]

    def _forget_oldest(self) -> None:
        num_tasks = [1 if p is None else len(p.graph.tasks) for p in self._passes.values()]
        while len(self._passes) > 1 and sum(num_tasks) > MAX_TASKS:
            del num_tasks[0]
            _, oldest = self._passes.popitem(last=False)
            if oldest is None:
                continue
            self._in_order.remove(oldest)
            self._counters.num_forgotten += 1
            for other in self._in_order:
                if other.alternating is oldest:
                    other.forget_alternating()

    def measured(self, graph: TaskGraph, settings: RunSettings) -> TaskGraph:
        """Return a taskgraph with the costs of its ops, measured where they are not known."""
        found = self.maker.measured(graph, settings)
        self._count_library()
        return found

    def _count_library(self) -> None:
        """Count in every pass the device bytes that libraries took for good since the last time."""
        grown = self.maker.meter.library_bytes - self._library_bytes
        self._library_bytes += grown
        if grown:
            for found in self._in_order:
                found.add_non_arena_bytes(grown)
