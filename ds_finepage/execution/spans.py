"""Measures when each step of a pass begins and ends.

On the CPU the thread of a lane reads the clock. On an accelerator events on the streams take the
times; they are read after the pass, so the host never waits in a pass.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ds_finepage.execution.device import Accelerator, device_of
from ds_finepage.execution.lanes import Action
from ds_finepage.execution.program import Step
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.timeline import Span


class CpuSpanRecorder:
    """Reads the clock of the host.

    Attributes:
        began_ns: When the last pass began, by the clock of the host.
    """

    def __init__(self) -> None:
        self.began_ns = 0
        self._spans: list[Span] = []

    def begin(self, steps: Sequence[Step], actions: Mapping[int, Action]) -> dict[int, Action]:
        """Begin a pass, and forget the last one.

        Args:
            steps: The steps of the pass.
            actions: Node id -> what the node does.

        Returns:
            The actions, which also record when they begin and end.
        """
        self._spans = []
        timed = {step.node.id: self._timed(step, actions[step.node.id]) for step in steps}
        self.began_ns = time.perf_counter_ns()
        return timed

    def _timed(self, step: Step, action: Action) -> Action:
        spans, clock, node, lane = self._spans, time.perf_counter_ns, step.node.id, step.lane

        def timed() -> None:
            start = clock()
            action()
            end = clock()
            spans.append(Span(node, lane, start - self.began_ns, end - self.began_ns))

        return timed

    def spans(self) -> tuple[Span, ...]:
        """Return the spans of the last pass by node; that pass must have succeeded."""
        return tuple(sorted(self._spans, key=lambda span: span.node))


class StreamSpanRecorder:
    """Enqueues an event before and after each step, on the stream of its lane."""

    def __init__(self, device: Accelerator) -> None:
        """Start without events; every pass uses them again."""
        self._device = device
        self.began_ns = 0
        self._origin = self._new_event()
        self._events: dict[int, tuple[Any, Any]] = {}  # by node
        self._lanes: dict[int, Lane] = {}  # of the nodes of the last pass

    def begin(self, steps: Sequence[Step], actions: Mapping[int, Action]) -> dict[int, Action]:
        """Begin a pass; :class:`CpuSpanRecorder` describes the arguments."""
        self._lanes = {step.node.id: step.lane for step in steps}
        for node in self._lanes.keys() - self._events.keys():
            self._events[node] = (self._new_event(), self._new_event())
        timed = {node: self._timed(node, actions[node]) for node in self._lanes}
        self._origin.record(self._device.current_stream())
        self.began_ns = time.perf_counter_ns()
        return timed

    def _timed(self, node: int, action: Action) -> Action:
        begin, end = self._events[node]

        def timed() -> None:
            stream = self._device.current_stream()
            begin.record(stream)
            action()
            end.record(stream)

        return timed

    def spans(self) -> tuple[Span, ...]:
        """Return the spans of the last pass by node; the host waits until the device is idle."""
        self._device.synchronize()
        found = []
        for node, lane in sorted(self._lanes.items()):
            start, end = map(self._since_origin_ns, self._events[node])
            found.append(Span(node, lane, start, max(start, end)))
        return tuple(found)

    def _new_event(self) -> Any:
        return self._device.new_event(is_timed=True)

    def _since_origin_ns(self, event: Any) -> int:
        return max(0, int(self._origin.elapsed_time(event) * 1e6))


SpanRecorder: TypeAlias = CpuSpanRecorder | StreamSpanRecorder
"""Records the spans of one plan, one pass at a time."""


def make_span_recorder(device: torch.device) -> SpanRecorder:
    """Return a recorder for the lanes of a device."""
    found = device_of(device)
    return StreamSpanRecorder(found) if isinstance(found, Accelerator) else CpuSpanRecorder()
