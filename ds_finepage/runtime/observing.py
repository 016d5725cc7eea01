"""Keeps the measured timelines of passes, and predicts the same passes."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from dataclasses import dataclass

import torch

from ds_finepage.execution.executor import Executor
from ds_finepage.execution.spans import SpanRecorder
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.simulator import measured_timeline, simulate
from ds_finepage.reporting.results import DECODE, PREFILL, ObservedPass
from ds_finepage.runtime.passes import Pass

OTHER_PASS = "pass"
"""The name of a pass that reads no tokens."""

MOST_BEGINS = 32
"""Runs of a pass whose time before the lanes is remembered."""


@dataclass(frozen=True, slots=True)
class _Observation:
    """The last run of a pass: its plan, its spans, and what it did not find in the arena."""

    memgraph: MemGraph
    recorder: SpanRecorder
    entry_missing: frozenset[int]
    # From the call to the begin of the lanes, run by run. The first recorded run is left out:
    # its call may have captured and planned.
    begins_ns: tuple[int, ...]


class Observer:
    """Records the passes that run by plan, while it is on."""

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self._device = device
        self._called_ns = 0
        self._before: _Observation | None = None  # of the pass that runs
        self._passes: dict[Pass, _Observation] = {}

    def forget(self) -> None:
        """Forget the passes so far."""
        self._passes.clear()

    def begin_call(self) -> None:
        """Note that a call of the model begins."""
        if self.is_on:
            self._called_ns = time.perf_counter_ns()

    def before_run(self, found: Pass, executor: Executor) -> None:
        """Let an executor record its next run, or not."""
        if not self.is_on:
            executor.recorder = None
            return
        self._before = self._passes.pop(found, None)  # in case the run fails
        if executor.recorder is None:
            executor.recorder = SpanRecorder(self._device)

    def after_run(self, found: Pass, executor: Executor) -> None:
        """Keep what an executor has recorded of its last run."""
        if executor.recorder is not None:
            begins_ns: tuple[int, ...] = ()
            if self._before is not None:
                begin_ns = max(0, executor.recorder.began_ns - self._called_ns)
                begins_ns = (*self._before.begins_ns[-MOST_BEGINS:], begin_ns)
            self._passes[found] = _Observation(
                executor.memgraph, executor.recorder, executor.entry_missing, begins_ns
            )

    def observed(self, profile: HardwareProfile) -> list[ObservedPass]:
        """Return the recorded passes, in the order of their last run."""
        found, seen = [], Counter[str]()
        for each in self._passes.values():
            name = name_of(each.memgraph.graph)
            seen[name] += 1
            begins_ns = each.begins_ns or (0,)
            predicted = simulate(
                each.memgraph,
                profile,
                entry_missing=each.entry_missing,
                begin_ns=statistics.median_low(begins_ns),
            )
            found.append(
                ObservedPass(
                    name=name if seen[name] == 1 else f"{name}_{seen[name]}",
                    memgraph=each.memgraph,
                    predicted=predicted,
                    measured=measured_timeline(
                        each.memgraph, each.recorder.spans(), begin_ns=begins_ns[-1]
                    ),
                )
            )
        return found


def token_tables(graph: TaskGraph) -> list[tuple[int, int]]:
    """Return the shapes (sequences, tokens) of the inputs that are tables of integers.

    They are token ids, positions, or a mask.
    """
    shapes = []
    for each in graph.inputs:
        view = graph.tensors[each.tensor]
        is_input = graph.buffers[view.buffer].kind in (BufferKind.INPUT, BufferKind.HOST)
        if is_input and view.dtype in ("int64", "int32") and len(view.shape) == 2:
            shapes.append((view.shape[0], view.shape[1]))
    return shapes


def name_of(graph: TaskGraph) -> str:
    """Name a pass: "prefill" if it reads more than one token a sequence, "decode" for one.

    A mask is as long as the cache, so the shortest table counts. A pass without any is "pass".
    """
    lengths = [tokens for _, tokens in token_tables(graph)]
    if not lengths:
        return OTHER_PASS
    return DECODE if min(lengths) == 1 else PREFILL
