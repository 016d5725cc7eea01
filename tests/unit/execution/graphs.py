"""Taskgraphs of real ops, written by hand."""

from __future__ import annotations

import math
from typing import Any

import torch

from ds_finepage.graph.arguments import refs
from ds_finepage.graph.taskgraph import (
    JOIN,
    Buffer,
    BufferKind,
    GraphInput,
    GraphOutput,
    Ref,
    Task,
    TaskGraph,
    TensorView,
)

WEIGHT, STATE, ACTIVATION = BufferKind.WEIGHT, BufferKind.STATE, BufferKind.ACTIVATION
INPUT, OUTPUT, CONSTANT = BufferKind.INPUT, BufferKind.OUTPUT, BufferKind.CONSTANT
HOST = BufferKind.HOST


class Draft:
    """A taskgraph in the making."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.tensors: list[TensorView] = []
        self.tasks: list[Task] = []

    def tensor(
        self,
        kind: BufferKind,
        *shape: int,
        dtype: str = "float32",
        name: str = "",
        payload: bytes | None = None,
    ) -> Ref:
        """Add a buffer with one contiguous tensor on it."""
        buffer = len(self.buffers)
        nbytes = math.prod(shape) * getattr(torch, dtype).itemsize
        self.buffers.append(Buffer(buffer, kind, nbytes, name or f"b{buffer}", payload))
        stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        self.tensors.append(TensorView(len(self.tensors), buffer, dtype, shape, stride))
        return Ref(len(self.tensors) - 1)

    def view(
        self,
        of: Ref,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int = 0,
        dtype: str | None = None,
    ) -> Ref:
        """Add another tensor on a buffer."""
        base = self.tensors[of.tensor]
        self.tensors.append(
            TensorView(len(self.tensors), base.buffer, dtype or base.dtype, shape, stride, offset)
        )
        return Ref(len(self.tensors) - 1)

    def task(
        self,
        op: str,
        *args: Any,
        out: tuple[Ref | None, ...] = (),
        changes: tuple[Ref, ...] = (),
        **kwargs: Any,
    ) -> None:
        """Add a task that reads the tensors among its arguments."""
        made = [r for r in out if r is not None]
        self.tasks.append(
            Task(
                index=len(self.tasks),
                op=op,
                label=f"layer{len(self.tasks)}",
                args=args,
                kwargs=tuple(kwargs.items()),
                results=tuple(None if r is None else r.tensor for r in out),
                reads=self._buffers(*refs((args, tuple(kwargs.items()))), *changes),
                writes=self._buffers(*made, *changes),
            )
        )

    def join(self, of: Ref) -> None:
        """Add a join."""
        self.tasks.append(Task(len(self.tasks), JOIN, reads=self._buffers(of)))

    def graph(
        self, inputs: tuple[Ref, ...] = (), outputs: tuple[GraphOutput | Ref, ...] = ()
    ) -> TaskGraph:
        """Return the taskgraph; inputs stand in the order of the call's arguments."""
        return TaskGraph(
            "by hand",
            tuple(self.buffers),
            tuple(self.tensors),
            tuple(self.tasks),
            tuple(GraphInput(i, r.tensor) for i, r in enumerate(inputs)),
            tuple(GraphOutput(tensor=o.tensor) if isinstance(o, Ref) else o for o in outputs),
        )

    def _buffers(self, *refs: Ref) -> tuple[int, ...]:
        return tuple(sorted({self.tensors[r.tensor].buffer for r in refs}))
