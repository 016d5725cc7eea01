"""Turns what a recorder has written down into a taskgraph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from typing import Any

import sympy

from ds_finepage.capture.lengths import Evaluator
from ds_finepage.capture.recorder import BufferDraft, Recorder
from ds_finepage.graph.taskgraph import (
    Buffer,
    BufferKind,
    GraphInput,
    GraphOutput,
    Ref,
    Task,
    TaskGraph,
    TensorView,
)


def finish(
    recorder: Recorder,
    name: str,
    inputs: tuple[GraphInput, ...],
    outputs: tuple[GraphOutput, ...],
    *,
    values: Mapping[str, int] | None = None,
    symbols: tuple[tuple[str, int], ...] = (),
) -> TaskGraph:
    """Turn a recording into a taskgraph, without the tasks whose results are unused.

    ``values`` are those of the symbols of a recording that has any. ``symbols`` are their names,
    and the call position that carries each.
    """
    size = Evaluator(values or {})
    returned = {recorder.tensors[o.tensor].buffer for o in outputs if o.tensor is not None}
    kept, num_kept = _kept_tasks(recorder, returned)
    used = {b for task in kept for b in task.buffers} | returned
    used |= {recorder.tensors[i.tensor].buffer for i in inputs}
    buffers = {old: new for new, old in enumerate(sorted(used))}  # ids of buffers stay sorted
    views = [view for view in recorder.tensors if view.buffer in buffers]
    tensors = {view.id: new for new, view in enumerate(views)}

    final = partial(_final, tensors, size)
    return TaskGraph(
        name=name,
        buffers=tuple(
            _buffer(new, recorder.buffers[old], old in returned, tensors, size)
            for old, new in buffers.items()
        ),
        tensors=tuple(
            TensorView(new, buffers[v.buffer], v.dtype, *map(final, (v.shape, v.stride, v.offset)))
            for new, v in enumerate(views)
        ),
        tasks=tuple(
            replace(
                task,
                index=index,
                args=final(task.args),
                kwargs=final(task.kwargs),
                results=tuple(None if r is None else tensors[r] for r in task.results),
                reads=tuple(buffers[b] for b in task.reads),
                writes=tuple(buffers[b] for b in task.writes),
                flops=int(final(task.flops)),
                moved_bytes=int(final(task.moved_bytes)),
            )
            for index, task in enumerate(kept)
        ),
        inputs=tuple(GraphInput(i.position, tensors[i.tensor]) for i in inputs),
        outputs=tuple(o if o.tensor is None else GraphOutput(tensors[o.tensor]) for o in outputs),
        versions=versions(),
        calls=tuple(
            replace(c, begin=len(kept) - num_kept[c.begin], end=len(kept) - num_kept[c.end])
            for c in recorder.calls
        ),
        symbols=symbols,
    )


def versions() -> tuple[tuple[str, str], ...]:
    """The versions on which a captured taskgraph depends."""
    return tuple((name, version(name)) for name in ("torch", "transformers"))


def _final(tensors: dict[int, int], size: Evaluator, value: Any) -> Any:
    """Return an argument with new ids, and with numbers for sizes."""
    if isinstance(value, Ref):
        return Ref(tensors[value.tensor])
    if isinstance(value, tuple):
        return tuple(_final(tensors, size, part) for part in value)
    return size(value) if isinstance(value, sympy.Expr) else value


def _kept_tasks(recorder: Recorder, returned: set[int]) -> tuple[list[Task], list[int]]:
    """Return the tasks whose results are used, and how many of them stand at or after each task."""
    kept: list[Task] = []
    wanted = set(returned)
    num_kept = [0] * (len(recorder.tasks) + 1)
    for task in reversed(recorder.tasks):
        kinds = (recorder.buffers[b].kind for b in task.writes)
        if not wanted.isdisjoint(task.writes) or set(kinds) - {BufferKind.ACTIVATION}:
            kept.append(task)
            wanted.update(task.reads)
        num_kept[task.index] = len(kept)
    kept.reverse()
    return kept, num_kept


def _buffer(
    index: int, draft: BufferDraft, is_returned: bool, tensors: dict[int, int], size: Evaluator
) -> Buffer:
    kind = draft.kind
    if kind is BufferKind.INPUT and draft.is_written:
        kind = BufferKind.STATE
    elif kind is BufferKind.ACTIVATION and is_returned:
        kind = BufferKind.OUTPUT
    gather = None if draft.handed is None else tensors[draft.handed]
    return Buffer(index, kind, size(draft.nbytes), draft.name, draft.payload, gather=gather)
