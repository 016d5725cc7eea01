"""Chrome traces: lanes are threads, nanoseconds become microseconds, the text is JSON."""

from __future__ import annotations

import json
from typing import Any

from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.timeline import Span, Timeline
from ds_finepage.reporting.chrome_trace import chrome_trace_json
from tests.unit.reporting.folders import planned

SPANS = (
    Span(0, Lane.H2D, 0, 1_500, "reload w"),
    Span(3, Lane.COMPUTE, 1_500, 1_501, 'mm "quoted"'),
    Span(4, Lane.D2H, 2_000, 2_000),
)
TIMELINE = Timeline(SPANS, 2_000, 1, 1_500, 1_500, 64)


def events_of(**timelines: Timeline) -> list[dict[str, Any]]:
    memgraph = planned().memgraph
    text = chrome_trace_json({name: (memgraph, each) for name, each in timelines.items()})
    found: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    assert text.count("\n") == max(1, len(found)) + 2  # one event a line
    return found


def names(events: list[dict[str, Any]], of: str) -> list[str]:
    return [e["args"]["name"] for e in events if e["name"] == of]


def test_spans_become_events_on_their_lanes() -> None:
    found = events_of(predicted=TIMELINE)
    threads = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    events = [e for e in found if e["ph"] == "X"]
    assert [(threads[e["tid"]], e["cat"], e["ts"], e["dur"], e["name"]) for e in events] == [
        ("h2d", "h2d", 0.0, 1.5, "reload w"),
        ("compute", "compute", 1.5, 0.001, 'mm "quoted"'),
        ("d2h", "d2h", 2.0, 0.0, "node 4"),
    ]
    assert [e["args"]["node"] for e in events] == [0, 3, 4]


def test_timelines_are_processes() -> None:
    found = events_of(predicted=TIMELINE, measured=TIMELINE)
    assert names(found, "process_name") == ["predicted", "measured"]
    assert [e["pid"] for e in found if e["ph"] == "X"] == [1, 1, 1, 2, 2, 2]


def test_every_lane_is_named_even_if_idle() -> None:
    empty = Timeline((), 0, 0, 0, 0, 0)
    assert names(events_of(predicted=empty), "thread_name") == ["compute", "h2d", "d2h"]
    assert events_of() == []
