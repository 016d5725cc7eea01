"""Measures when each step of a pass begins and ends.

On the CPU the thread of a lane reads the clock. On an accelerator events on the streams take the
times; they are read after the pass, so the host never waits in a pass.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_finepage.execution.device import Accelerator, device_of
from ds_finepage.execution.lanes import Action
from ds_finepage.execution.program import Step
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.timeline import Span


class SpanRecorder:
    """Records the spans of one plan, one pass at a time.

    Attributes:
        began_ns: When the last pass began, by the clock of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self.began_ns = 0
        self._marks: dict[int, tuple[Lane, Any, Any]] = {}  # of each node in the last pass
        self._origin: Any = None

    def begin(self, steps: Sequence[Step], actions: Mapping[int, Action]) -> dict[int, Action]:
        """Begin a pass, and forget the last one.

        Returns:
            The actions, which also record when they begin and end.
        """
        self._marks = {}
        timed = {step.node.id: self._timed(step, actions[step.node.id]) for step in steps}
        self._origin, self.began_ns = self._mark(), time.perf_counter_ns()
        return timed

    def _timed(self, step: Step, action: Action) -> Action:
        def timed() -> None:
            begin = self._mark()
            action()
            self._marks[step.node.id] = step.lane, begin, self._mark()

        return timed

    def spans(self) -> tuple[Span, ...]:
        """Return the spans of the last pass by node; that pass must have succeeded.

        The host waits until the device is idle.
        """
        self._device.synchronize()
        found = []
        for node, (lane, *marks) in sorted(self._marks.items()):
            start, end = map(self._since_origin_ns, marks)
            found.append(Span(node, lane, start, max(start, end)))
        return tuple(found)

    def _mark(self) -> Any:
        """Return the time of now; on an accelerator, an event on the current stream."""
        if not isinstance(self._device, Accelerator):
            return time.perf_counter_ns()
        event = self._device.new_event(is_timed=True)
        event.record(self._device.current_stream())
        return event

    def _since_origin_ns(self, mark: Any) -> int:
        if isinstance(mark, int):
            return mark - int(self._origin)
        return max(0, int(self._origin.elapsed_time(mark) * 1e6))
