"""Timelines as Chrome trace JSON, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ds_finepage.graph.memgraph import Lane, MemGraph
from ds_finepage.graph.timeline import Timeline
from ds_finepage.reporting.memory import MemorySeries, memory_over_time

_THREADS = {lane: thread for thread, lane in enumerate(Lane, start=1)}


def chrome_trace(
    timelines: Mapping[str, Timeline], plans: Mapping[str, MemGraph] | None = None
) -> dict[str, Any]:
    """Return a trace of one or more timelines: each is a process, and its lanes are threads.

    Args:
        timelines: Timelines by their names in the trace.
        plans: The plans of some of them, by the same names. A process with a plan has a counter of
            its device memory, by kind.
    """
    plans = plans or {}
    events: list[dict[str, Any]] = []
    for process, (title, timeline) in enumerate(timelines.items(), start=1):
        events.append(_metadata("process_name", process, 0, name=title))
        events.append(_metadata("process_sort_index", process, 0, sort_index=process))
        used = {span.lane for span in timeline.spans}
        for lane, thread in _THREADS.items():
            if lane is Lane.RANKS and lane not in used:
                continue  # one rank has no others
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
        if title in plans:
            events.extend(_memory(process, memory_over_time(plans[title], timeline)))
    return {"displayTimeUnit": "ns", "traceEvents": events}


def chrome_trace_json(
    timelines: Mapping[str, Timeline], plans: Mapping[str, MemGraph] | None = None
) -> str:
    """Return `chrome_trace` as text, one event a line."""
    trace = chrome_trace(timelines, plans)
    events = ",\n".join(json.dumps(event, allow_nan=False) for event in trace["traceEvents"])
    return f'{{"displayTimeUnit": "ns", "traceEvents": [\n{events}\n]}}\n'


def _memory(process: int, series: MemorySeries) -> Iterator[dict[str, Any]]:
    for number, at_ns in enumerate(series.at):
        nbytes = {kind.value: values[number] for kind, values in series.nbytes.items()}
        yield {
            "ph": "C",
            "name": "device memory in bytes",
            "pid": process,
            "ts": at_ns / 1000,
            "args": nbytes,
        }


def _metadata(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}
