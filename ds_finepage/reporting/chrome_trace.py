"""Timelines as Chrome trace JSON, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.timeline import Timeline

_THREADS = {lane: thread for thread, lane in enumerate(Lane, start=1)}


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Return a trace of one or more timelines: each is a process, and its lanes are threads.

    Args:
        timelines: Timelines by their names in the trace.
    """
    events: list[dict[str, Any]] = []
    for process, (title, timeline) in enumerate(timelines.items(), start=1):
        events.append(_metadata("process_name", process, 0, name=title))
        events.append(_metadata("process_sort_index", process, 0, sort_index=process))
        for lane, thread in _THREADS.items():
            events.append(_metadata("thread_name", process, thread, name=lane.value))
            events.append(_metadata("thread_sort_index", process, thread, sort_index=thread))
        events.extend(
            {
                "ph": "X",
                "name": span.name or f"node {span.node}",
                "cat": span.lane.value,
                "pid": process,
                "tid": _THREADS[span.lane],
                "ts": span.start_ns / 1000,  # the format counts in microseconds
                "dur": (span.end_ns - span.start_ns) / 1000,
                "args": {"node": span.node},
            }
            for span in timeline.spans
        )
    return {"displayTimeUnit": "ns", "traceEvents": events}


def chrome_trace_json(timelines: Mapping[str, Timeline]) -> str:
    """Return `chrome_trace` as text, one event a line."""
    trace = chrome_trace(timelines)
    events = ",\n".join(json.dumps(event, allow_nan=False) for event in trace["traceEvents"])
    return f'{{"displayTimeUnit": "ns", "traceEvents": [\n{events}\n]}}\n'


def _metadata(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}
