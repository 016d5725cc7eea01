"""Several calls of a model as one pass, layer by layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

_SHARED = (BufferKind.WEIGHT, BufferKind.CONSTANT)


@dataclass(frozen=True, slots=True)
class Unrolled:
    """The taskgraph of several batches, and the new buffer ids of each batch."""

    graph: TaskGraph
    buffers: tuple[dict[int, int], ...]


def unroll(graph: TaskGraph, starts: Sequence[int], num_batches: int) -> Unrolled:
    """Unroll a pass for ``num_batches`` independent calls that take turns.

    Batches share weights and constants. Each has its own other buffers, its KV cache included.

    Args:
        graph: The pass of one batch.
        starts: First tasks of the turns, ascending, 0 first. All batches run one turn, one after
            the other, before any begins the next.
        num_batches: Number of calls.
    """
    copies = [_Copy(graph, batch) for batch in range(num_batches)]
    buffers, tensors = list(graph.buffers), list(graph.tensors)
    for copy in copies[1:]:
        copy.add_to(buffers, tensors)
    tasks: list[Task] = []
    for begin, end in zip(starts, [*starts[1:], len(graph.tasks)], strict=True):
        for copy in copies:
            for task in graph.tasks[begin:end]:
                tasks.append(copy.task(task, len(tasks)))
    num_positions = 1 + max((i.position for i in graph.inputs), default=-1)
    unrolled = dataclasses.replace(
        graph,
        name=f"{graph.name}, {num_batches} batches",
        buffers=tuple(buffers),
        tensors=tuple(tensors),
        tasks=tuple(tasks),
        inputs=tuple(
            found
            for batch, copy in enumerate(copies)
            for found in copy.inputs(batch * num_positions)
        ),
        outputs=tuple(
            found
            for batch, copy in enumerate(copies)
            for found in copy.outputs(batch * num_positions)
        ),
        calls=(),
        num_batches=graph.num_batches * num_batches,
    )
    return Unrolled(unrolled, tuple(copy.buffers for copy in copies))


class _Copy:
    """New ids for the buffers and tensors of one batch; batch 0 keeps the old ids."""

    def __init__(self, graph: TaskGraph, batch: int) -> None:
        self._graph, self._batch = graph, batch
        self.buffers = {b.id: b.id for b in graph.buffers}
        self._tensors = {t.id: t.id for t in graph.tensors}

    def add_to(self, buffers: list[Buffer], tensors: list[TensorView]) -> None:
        for buffer in self._graph.buffers:
            if buffer.kind not in _SHARED:
                self.buffers[buffer.id] = len(buffers)
                name = f"{buffer.name}#{self._batch}" if buffer.name else ""
                buffers.append(dataclasses.replace(buffer, id=len(buffers), name=name))
        for view in self._graph.tensors:
            if self._graph.buffers[view.buffer].kind not in _SHARED:
                self._tensors[view.id] = len(tensors)
                buffer_id = self.buffers[view.buffer]
                tensors.append(dataclasses.replace(view, id=len(tensors), buffer=buffer_id))

    def task(self, task: Task, index: int) -> Task:
        if self._batch == 0:
            return dataclasses.replace(task, index=index)
        return dataclasses.replace(
            task,
            index=index,
            args=self._value(task.args),
            kwargs=tuple((name, self._value(value)) for name, value in task.kwargs),
            results=tuple(None if t is None else self._tensors[t] for t in task.results),
            reads=self._ids(task.reads),
            writes=self._ids(task.writes),
            touches=self._ids(task.touches),
        )

    def inputs(self, shift: int) -> list[GraphInput]:
        return [
            GraphInput(i.position + shift, self._tensors[i.tensor])
            for i in self._graph.inputs
            if self._batch == 0 or self._tensors[i.tensor] != i.tensor
        ]

    def outputs(self, shift: int) -> list[GraphOutput]:
        return [
            dataclasses.replace(
                o,
                tensor=None if o.tensor is None else self._tensors[o.tensor],
                position=None if o.position is None else o.position + shift,
            )
            for o in self._graph.outputs
        ]

    def _ids(self, buffers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(self.buffers[b] for b in buffers))

    def _value(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return Ref(self._tensors[value.tensor])
        if isinstance(value, tuple):
            return tuple(self._value(v) for v in value)
        return value
