"""Turns what a recorder has written down into a taskgraph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_finepage.capture.lengths import Evaluator
from ds_finepage.capture.recorder import BufferDraft, Formula, Recorder, TaskDraft
from ds_finepage.graph.taskgraph import (
    Buffer,
    BufferKind,
    GraphInput,
    GraphOutput,
    ModuleCall,
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
    versions: tuple[tuple[str, str], ...],
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
    used = {b for task in kept for b in task.reads | task.writes} | returned
    used |= {recorder.tensors[i.tensor].buffer for i in inputs}
    order = [b for b in range(len(recorder.buffers)) if b in used]
    renumber = {old: new for new, old in enumerate(order)}
    tensors, tensor_ids = _kept_tensors(recorder, renumber, size)
    return TaskGraph(
        name=name,
        buffers=tuple(
            _buffer(renumber[b], recorder.buffers[b], b in returned, tensor_ids, size)
            for b in order
        ),
        tensors=tensors,
        tasks=tuple(_task(i, t, renumber, tensor_ids, size) for i, t in enumerate(kept)),
        inputs=tuple(GraphInput(i.position, tensor_ids[i.tensor]) for i in inputs),
        outputs=tuple(
            o if o.tensor is None else GraphOutput(tensor=tensor_ids[o.tensor]) for o in outputs
        ),
        versions=versions,
        calls=tuple(
            ModuleCall(
                name=c.name,
                class_name=c.class_name,
                depth=c.depth,
                begin=len(kept) - num_kept[c.begin],
                end=len(kept) - num_kept[c.end],
            )
            for c in recorder.calls
        ),
        symbols=symbols,
    )


def _kept_tasks(recorder: Recorder, returned: set[int]) -> tuple[list[TaskDraft], list[int]]:
    """Return the tasks whose results are used, and how many of them stand at or after each task."""
    kept: list[TaskDraft] = []
    wanted = set(returned)
    num_kept = [0] * (len(recorder.tasks) + 1)
    for index, task in reversed(list(enumerate(recorder.tasks))):
        kinds = (recorder.buffers[b].kind for b in task.writes)
        if wanted & task.writes or any(kind is not BufferKind.ACTIVATION for kind in kinds):
            kept.append(task)
            wanted |= task.reads
        num_kept[index] = len(kept)
    kept.reverse()
    return kept, num_kept


def _kept_tensors(
    recorder: Recorder, buffers: dict[int, int], size: Evaluator
) -> tuple[tuple[TensorView, ...], dict[int, int]]:
    """Return the views of the buffers that are kept, and the new id of each."""
    tensors: list[TensorView] = []
    ids: dict[int, int] = {}
    for view in recorder.tensors:
        if view.buffer in buffers:
            ids[view.id] = len(tensors)
            tensors.append(
                TensorView(
                    len(tensors),
                    buffers[view.buffer],
                    view.dtype,
                    size.all(view.shape),
                    size.all(view.stride),
                    size(view.offset),
                )
            )
    return tuple(tensors), ids


def _buffer(
    index: int, draft: BufferDraft, is_returned: bool, tensor_ids: dict[int, int], size: Evaluator
) -> Buffer:
    return Buffer(
        index,
        _final_kind(draft, is_returned),
        size(draft.nbytes),
        draft.name,
        draft.payload,
        gather=None if draft.handed is None else tensor_ids[draft.handed],
    )


def _task(
    index: int,
    draft: TaskDraft,
    buffers: dict[int, int],
    tensor_ids: dict[int, int],
    size: Evaluator,
) -> Task:
    return Task(
        index=index,
        op=draft.op,
        label=draft.label,
        args=_renumber(draft.args, tensor_ids, size),
        kwargs=tuple((k, _renumber(v, tensor_ids, size)) for k, v in draft.kwargs),
        results=tuple(None if r is None else tensor_ids[r] for r in draft.results),
        reads=tuple(sorted(buffers[b] for b in draft.reads)),
        writes=tuple(sorted(buffers[b] for b in draft.writes)),
        flops=int(size(draft.flops)),
        moved_bytes=int(size(draft.moved_bytes)),
    )


def _final_kind(draft: BufferDraft, is_returned: bool) -> BufferKind:
    if draft.kind is BufferKind.INPUT and draft.is_written:
        return BufferKind.STATE
    if draft.kind is BufferKind.ACTIVATION and is_returned:
        return BufferKind.OUTPUT
    return draft.kind


def _renumber(value: Any, ids: dict[int, int], size: Evaluator) -> Any:
    if isinstance(value, Ref):
        return Ref(ids[value.tensor])
    if isinstance(value, tuple):
        return tuple(_renumber(v, ids, size) for v in value)
    if isinstance(value, Formula):
        return size(value.size)
    return value
