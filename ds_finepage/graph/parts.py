"""Prepares a taskgraph for weights whose host masters lie in parts on several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ds_finepage.graph.arguments import Symbol
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph


def with_parts(graph: TaskGraph, whole_bytes: Mapping[str, int], num_ranks: int) -> TaskGraph:
    """Note which weights lie in parts on the ranks, and give their buffers room for all parts.

    All parts of a weight have the same size; ``whole_bytes`` is that of all together.

    Returns:
        The taskgraph; ``graph`` itself if it is prepared already, or no weight lies in parts.
    """
    if graph.parted or not whole_bytes:
        return graph
    buffers = list(graph.buffers)
    for buffer in graph.buffers:
        if buffer.kind is BufferKind.WEIGHT and buffer.name in whole_bytes:
            buffers[buffer.id] = replace(buffer, nbytes=whole_bytes[buffer.name])
    return replace(
        graph, buffers=tuple(buffers), parted=tuple(sorted(whole_bytes)), num_ranks=num_ranks
    )


def on_device(graph: TaskGraph, device: str) -> TaskGraph:
    """Return a taskgraph whose ops make their results on a device.

    Each rank captures with the name of its own device. A device without a number leaves the
    taskgraph as it is.
    """
    if ":" not in device:
        return graph

    def moved(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(map(moved, value))
        is_device = isinstance(value, Symbol) and value.kind == "device" and ":" in value.name
        return Symbol("device", device) if is_device else value

    tasks = tuple(
        replace(t, args=moved(t.args), kwargs=moved(t.kwargs))  # type: ignore[arg-type]
        for t in graph.tasks
    )
    return replace(graph, tasks=tasks)
