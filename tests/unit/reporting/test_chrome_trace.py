"""Chrome traces: lanes are threads, nanoseconds become microseconds, the text is JSON."""

from __future__ import annotations

import json

from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.timeline import Span, Timeline
from ds_finepage.reporting.chrome_trace import chrome_trace, chrome_trace_json

SPANS = (
    Span(0, Lane.H2D, 0, 1_500, "reload w"),
    Span(3, Lane.COMPUTE, 1_500, 1_501, 'mm "quoted"'),
    Span(4, Lane.D2H, 2_000, 2_000),
)
TIMELINE = Timeline(SPANS, 2_000, 1, 1_500, 1_500, 64, 1_500)


def test_spans_become_events_on_their_lanes() -> None:
    trace = chrome_trace({"predicted": TIMELINE})
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    threads = {
        e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"
    }
    assert [(threads[e["tid"]], e["cat"], e["ts"], e["dur"], e["name"]) for e in events] == [
        ("h2d", "h2d", 0.0, 1.5, "reload w"),
        ("compute", "compute", 1.5, 0.001, 'mm "quoted"'),
        ("d2h", "d2h", 2.0, 0.0, "node 4"),
    ]
    assert [e["args"]["node"] for e in events] == [0, 3, 4]


def test_timelines_are_processes() -> None:
    trace = chrome_trace({"predicted": TIMELINE, "measured": TIMELINE})
    names = [
        (e["pid"], e["args"]["name"]) for e in trace["traceEvents"] if e["name"] == "process_name"
    ]
    assert names == [(1, "predicted"), (2, "measured")]
    per_process = [e["pid"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert per_process == [1, 1, 1, 2, 2, 2]


def test_every_lane_is_named_even_if_idle() -> None:
    empty = Timeline((), 0, 0, 0, 0, 0, 0)
    events = chrome_trace({"predicted": empty})["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == [
        "compute",
        "h2d",
        "d2h",
    ]
    assert json.loads(chrome_trace_json({}))["traceEvents"] == []


def test_text_says_the_same() -> None:
    timelines = {"predicted": TIMELINE, "measured": TIMELINE}
    text = chrome_trace_json(timelines)
    assert json.loads(text) == chrome_trace(timelines)
    assert text == chrome_trace_json(timelines)
    assert text.count("\n") == len(chrome_trace(timelines)["traceEvents"]) + 2
