"""Times of nodes where ops and copies that overlap slow each other down.

An op runs slower while any copy does, and a copy while an op does. So the time of a node depends on
what the other lanes do meanwhile, and the lanes advance together, from event to event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import Lane, MemGraph


@dataclass(frozen=True, slots=True)
class Work:
    """The lane of one node, its time alone, and when the host has issued it.

    ``lane`` is None for a node that takes no time.
    """

    lane: Lane | None
    took_ns: int = 0
    issued_ns: int = 0


NO_WORK = Work(None)


_Time = TypeVar("_Time", int, float)


class Overlap:
    """One walk through a memgraph, all lanes at a time.

    Attributes:
        starts: When each node begins, by id; 0 for those without a lane.
        ends: When each node is complete, by id.
    """

    def __init__(
        self, memgraph: MemGraph, work: Sequence[Work], profile: HardwareProfile, begin_ns: int
    ) -> None:
        """Prepare; :meth:`run` walks.

        Args:
            memgraph: The plan.
            work: By node.
            profile: The machine.
            begin_ns: When the lanes begin.
        """
        self.starts = [0.0] * len(work)
        self.ends = [0.0] * len(work)
        self._work, self._wait_ns, self._step_ns = work, profile.wait_ns, profile.step_ns
        self._slowdown = {lane: profile.copy_slowdown for lane in Lane}
        self._slowdown[Lane.COMPUTE] = profile.op_slowdown
        self._num_open = [len(before) for before in memgraph.predecessors]
        self._after: list[list[int]] = [[] for _ in work]
        for node, before in enumerate(memgraph.predecessors):
            for each in before:
                self._after[each].append(node)
        self._queues: dict[Lane, list[int]] = {lane: [] for lane in Lane}
        for node in reversed(range(len(work))):
            lane = work[node].lane
            if lane is not None:
                self._queues[lane].append(node)  # the first one is at the end
        self._free = dict.fromkeys(Lane, float(begin_ns))
        self._left: dict[Lane, float] = {}  # time alone that the running node of a lane still needs

    def run(self) -> None:
        """Walk until every node is complete."""
        is_free = [
            w.lane is None and not n for w, n in zip(self._work, self._num_open, strict=True)
        ]
        for node in (node for node, free in enumerate(is_free) if free):
            self._complete(node, 0.0)
        now = min(self._free.values())
        while any(self._queues.values()):
            starts = self._next_starts()
            ends = {lane: now + left * self._factor(lane) for lane, left in self._left.items()}
            then = min([*starts.values(), *ends.values()])
            for lane, left in self._left.items():
                self._left[lane] = left - (then - now) / self._factor(lane)
            now = then
            for lane in [lane for lane, end in ends.items() if end == then]:
                del self._left[lane]
                self._free[lane] = then + self._step_ns
                self._complete(self._queues[lane].pop(), then)
            for lane in [lane for lane, start in starts.items() if start == then]:
                node = self._queues[lane][-1]
                self.starts[node] = then
                self._left[lane] = float(self._work[node].took_ns)

    def _next_starts(self) -> dict[Lane, float]:
        """For each idle lane whose next node is ready: when that begins."""
        found = {}
        for lane, queue in self._queues.items():
            if queue and lane not in self._left and not self._num_open[queue[-1]]:
                node = queue[-1]
                found[lane] = start_ns(
                    self.ends[node], self._free[lane], self._work[node].issued_ns, self._wait_ns
                )
        return found

    def _factor(self, lane: Lane) -> float:
        others = self._left.keys() - {lane}
        overlaps = others if lane is Lane.COMPUTE else others & {Lane.COMPUTE}
        return self._slowdown[lane] if overlaps else 1.0

    def _complete(self, node: int, time_ns: float) -> None:
        """Note that a node is complete; nodes that take no time follow at once.

        Until it is complete, ``ends`` of a node has the time of its latest predecessor.
        """
        complete = [(node, time_ns)]
        while complete:
            node, time_ns = complete.pop()
            self.ends[node] = time_ns
            for each in self._after[node]:
                self.ends[each] = max(self.ends[each], time_ns)
                self._num_open[each] -= 1
                if not self._num_open[each] and self._work[each].lane is None:
                    complete.append((each, self.ends[each]))


def start_ns(ready_ns: _Time, free_ns: _Time, issued_ns: int, wait_ns: int) -> _Time | int:
    """Return when a node begins.

    Args:
        ready_ns: When its last predecessor is complete.
        free_ns: When its lane is free.
        issued_ns: When the host has issued it.
        wait_ns: The time until a lane goes on after it had to wait for another.
    """
    start = max(free_ns, issued_ns)
    return start if ready_ns <= start else ready_ns + wait_ns
