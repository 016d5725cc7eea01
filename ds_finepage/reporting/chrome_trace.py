"""Timelines as Chrome trace JSON, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ds_finepage.graph.memgraph import Lane, MemGraph
from ds_finepage.graph.timeline import Timeline
from ds_finepage.reporting.memory import memory_over_time

USUAL = (Lane.COMPUTE, Lane.H2D, Lane.D2H)
"""The lanes that are shown even if nothing ran there."""

_THREADS = {lane: thread for thread, lane in enumerate(Lane, start=1)}


def chrome_trace_json(passes: Mapping[str, tuple[MemGraph, Timeline]]) -> str:
    """Return a trace of one or more passes, one event a line.

    Each pass is a process with a counter of its device memory by kind, and its lanes are threads.

    Args:
        passes: Plans and timelines by their names in the trace.
    """
    named = enumerate(passes.items(), start=1)
    events = [event for process, (title, each) in named for event in _events(process, title, *each)]
    text = ",\n".join(json.dumps(event, allow_nan=False) for event in events)
    return f'{{"displayTimeUnit": "ns", "traceEvents": [\n{text}\n]}}\n'


def _events(
    process: int, title: str, memgraph: MemGraph, timeline: Timeline
) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", process, 0, name=title)
    yield _metadata("process_sort_index", process, 0, sort_index=process)
    used = {span.lane for span in timeline.spans}
    for lane, thread in _THREADS.items():
        if lane not in USUAL and lane not in used:
            continue
        yield _metadata("thread_name", process, thread, name=lane.value)
        yield _metadata("thread_sort_index", process, thread, sort_index=thread)
    for span in timeline.spans:
        yield {
            "ph": "X",
            "name": span.name or f"node {span.node}",
            "cat": span.lane.value,
            "pid": process,
            "tid": _THREADS[span.lane],
            "ts": span.start_ns / 1000,  # the format counts in microseconds
            "dur": (span.end_ns - span.start_ns) / 1000,
            "args": {"node": span.node},
        }
    series = memory_over_time(memgraph, timeline)
    for number, at_ns in enumerate(series.at):
        yield {
            "ph": "C",
            "name": "device memory in bytes",
            "pid": process,
            "ts": at_ns / 1000,
            "args": {kind.value: values[number] for kind, values in series.nbytes.items()},
        }


def _metadata(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}
