"""Timelines: the start and the end of each node, predicted or measured."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import NonNegativeInt

from ds_finepage.graph.memgraph import Lane


@dataclass(frozen=True, slots=True)
class Span:
    """One node on one lane; times in nanoseconds since the pass began."""

    node: NonNegativeInt
    lane: Lane
    start_ns: NonNegativeInt
    end_ns: NonNegativeInt
    name: str = ""


@dataclass(frozen=True)
class Timeline:
    """A pass in time.

    ``stall_ns`` is the time that the compute lane waited, from the start of the pass to the end of
    its last node.
    """

    spans: tuple[Span, ...]
    total_ns: NonNegativeInt
    compute_ns: NonNegativeInt
    transfer_ns: NonNegativeInt  # the busiest of the transfer lanes
    stall_ns: NonNegativeInt
    peak_bytes: NonNegativeInt  # largest sum of bytes that are allocated in the arena at one time

    def busy_ns(self, lane: Lane) -> int:
        """Return the time during which a lane has work."""
        return sum(span.end_ns - span.start_ns for span in self.spans if span.lane is lane)
