"""What a taskgraph computes, as names instead of numbers: equal names, equal values.

A name says how a value came about: by which op of which module, out of which values. It knows
nothing of task indices and buffer ids, so two taskgraphs that compute the same agree in it.
"""

from __future__ import annotations

import hashlib
from typing import Any

from ds_finepage.graph.taskgraph import BufferKind, Ref, Task, TaskGraph


def values_at_end(graph: TaskGraph) -> dict[int, str]:
    """Return what the caller finds in its buffers behind the pass, by id."""
    now = {
        b.id: f"given {b.id}"
        for b in graph.buffers
        if b.kind not in (BufferKind.ACTIVATION, BufferKind.OUTPUT)
    }
    for task in graph.tasks:
        # A task that reads what nobody made is a fault, unless it is one of several touches.
        assert all(b in now or b in task.touches for b in task.reads), task.where
        found = [now[b] for b in task.reads if b in now]
        operands = _views(graph, now, (task.args, task.kwargs)) or sorted(found)
        for at, buffer in enumerate((*task.writes, *task.touches)):
            before = now.get(buffer, "") if buffer in (*task.reads, *task.touches) else ""
            now[buffer] = _name(task, at, operands, before)
    return {b: name for b, name in now.items() if not graph.buffers[b].kind.is_paged}


def _name(task: Task, at: int, operands: list[Any], before: str) -> str:
    text = repr((task.op, task.label, at, operands, before))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _views(graph: TaskGraph, now: dict[int, str], value: Any) -> list[Any]:
    """List the tensors among a task's arguments by what they hold and how they look at it."""
    if isinstance(value, Ref):
        view = graph.tensors[value.tensor]
        return [(now[view.buffer], view.dtype, view.shape, view.stride, view.offset)]
    if isinstance(value, tuple):
        return [found for item in value for found in _views(graph, now, item)]
    return []
