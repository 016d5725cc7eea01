"""Gives attention to the host: TaskGraph -> TaskGraph.

The host attends to the rows of a KV cache where they lie. So they take no device bytes and no
copies; the plan sends the queries and the new rows, and gets the result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from ds_finepage.graph.arguments import Ref, refs
from ds_finepage.graph.attention import HOST_ATTENTION, SPAN_TOKENS, SPANS, Attention
from ds_finepage.graph.taskgraph import ITEMSIZE, BufferKind, Task, TaskGraph, TensorView


def with_host_attention(graph: TaskGraph, units: Iterable[Attention]) -> TaskGraph:
    """Let the host compute attention.

    Args:
        graph: The pass.
        units: Some of what :func:`attentions` names.
    """
    chosen = {unit.task: unit for unit in units}
    gone = {task for unit in chosen.values() for task in unit.copied}
    rows = {buffer for unit in chosen.values() for buffer in unit.rows}
    tasks, tensors = list[Task](), list(graph.tensors)
    for task in graph.tasks:
        if task.index in gone:
            continue
        unit = chosen.get(task.index)
        changed = task if unit is None else _of_one_head(host_task(graph, unit), tensors)
        tasks.append(dataclasses.replace(changed, index=len(tasks)))
    buffers = (
        dataclasses.replace(b, kind=BufferKind.MASTER) if b.id in rows else b for b in graph.buffers
    )
    return dataclasses.replace(
        graph, tasks=tuple(tasks), buffers=tuple(buffers), tensors=tuple(tensors), calls=()
    )


def _of_one_head(task: Task, tensors: list[TensorView]) -> Task:
    """Let a task read a mask that all heads share once; a kernel of a device names it for each."""
    *args, mask, scale = task.args
    if mask is None or tensors[mask.tensor].shape[1] == 1:
        return task
    batch, _, *others = tensors[mask.tensor].shape
    view = dataclasses.replace(tensors[mask.tensor], id=len(tensors), shape=(batch, 1, *others))
    tensors.append(view)
    return dataclasses.replace(task, args=(*args, Ref(view.id), scale))


def host_task(graph: TaskGraph, unit: Attention) -> Task:
    """Return the task with which the host attends, in place of the captured one."""
    task = graph.tasks[unit.task]
    query, old = (graph.tensors[unit.args[at].tensor] for at in (0, 1))
    out = graph.tensors[task.results[0]]  # type: ignore[index]
    used = {graph.tensors[ref.tensor].buffer for ref in refs(unit.args)}
    return dataclasses.replace(
        task,
        op=HOST_ATTENTION,
        args=unit.args,
        kwargs=(),
        results=(out.id,),
        reads=tuple(sorted({*used, *unit.rows})),
        writes=(out.buffer,),
        workspace_bytes=_workspace_bytes(query, old.shape[0] + query.shape[2]),
        moved_bytes=unit.nbytes + 2 * math.prod(query.shape) * ITEMSIZE[query.dtype],
        time_ns=None,
    )


def _workspace_bytes(query: TensorView, num_tokens: int) -> int:
    """Return the bytes of what the op makes: queries and results twice, parts, and a mask twice."""
    batch, heads, num_new, width = query.shape
    num_results = batch * heads * num_new
    spans = min(SPANS, -(-num_tokens // SPAN_TOKENS))
    parts = num_results * (4 * width + spans * (width + 2))
    return (parts + 2 * batch * num_new * num_tokens) * ITEMSIZE["float32"]
