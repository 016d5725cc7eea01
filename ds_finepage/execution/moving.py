"""Tensors and arguments whose sizes follow from the sizes of a call.

A plan is made for the largest call of its kind. A smaller call uses views of the same extents in
smaller shapes. All formulas of a graph are one compiled function. It runs only when the sizes
change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ds_finepage.execution.arena import view_of
from ds_finepage.execution.ops import Patch
from ds_finepage.graph.taskgraph import Buffer, Length, TaskGraph, TensorView


class MovingViews:
    """The tensors of a graph in the shapes of the current call.

    ``views`` has them by tensor id.
    """

    def __init__(self, graph: TaskGraph) -> None:
        self.views: list[TensorView] = list(graph.tensors)
        self._positions = [position for _, position in graph.symbols]
        self._varying = dict.fromkeys(t.id for t in graph.tensors if _varies(t))  # in order
        self._sizes: tuple[int, ...] | None = None
        self._places: list[Patch] = []
        self._buffers = [b.id for b in graph.buffers if isinstance(b.nbytes, Length)]
        self._planned = {b: int(graph.buffers[b].nbytes) for b in self._buffers}
        self._nbytes = dict(self._planned)
        self._names = [name for name, _ in graph.symbols]
        self._shapes = self._compile(
            [_text(graph.tensors[t]) for t in self._varying]
            + [graph.buffers[b].nbytes.formula for b in self._buffers]  # type: ignore[attr-defined]
        )
        self._arguments: Callable[..., tuple[Any, ...]] | None = None

    def varies(self, tensor: int) -> bool:
        """Return True if a tensor's shape, strides or offset depend on the call."""
        return tensor in self._varying

    def nbytes(self, buffer: Buffer) -> int:
        """Return the bytes of a buffer in the current call."""
        return self._nbytes.get(buffer.id, buffer.nbytes)

    def add(
        self, patch: Patch, storage_of: torch.Tensor | None = None, offset_bytes: int = 0
    ) -> None:
        """Fill a place for each call from now on.

        A tensor gets any tensor on its storage, and the begin of its buffer there.
        """
        self._places.append(patch)
        if patch.tensor is not None:
            assert storage_of is not None
            tensor = view_of(storage_of, self.views[patch.tensor], offset_bytes)
            patch.container[patch.key] = tensor
            patch.begin = offset_bytes // tensor.element_size()

    def set_sizes(self, args: Sequence[Any]) -> bool:
        """Fill all places for the sizes of a call; return False if a buffer is too small."""
        sizes = tuple(args[position] for position in self._positions)
        if sizes == self._sizes or not self._positions:
            return True
        values = self._shapes(*sizes)
        nbytes = dict(zip(self._buffers, values[len(self._varying) :], strict=True))
        if any(nbytes[b] > self._planned[b] for b in self._buffers):
            return False
        for tensor, (shape, stride, offset) in zip(self._varying, values, strict=False):
            old = self.views[tensor]
            self.views[tensor] = TensorView(tensor, old.buffer, old.dtype, shape, stride, offset)
        self._nbytes = nbytes
        if self._arguments is None:
            texts = [p.size.formula for p in self._places if p.size is not None]
            self._arguments = self._compile(texts)
        self._fill(iter(self._arguments(*sizes)))
        self._sizes = sizes
        return True

    def _fill(self, arguments: Iterator[Any]) -> None:
        for patch in self._places:
            if patch.tensor is None:
                patch.container[patch.key] = next(arguments)
            else:
                view, tensor = self.views[patch.tensor], patch.container[patch.key]
                tensor.as_strided_(view.shape, view.stride, patch.begin + view.offset)

    def _compile(self, texts: Sequence[str]) -> Callable[..., tuple[Any, ...]]:
        body = "".join(f"{text}, " for text in texts)
        names = {"__builtins__": {"min": min, "max": max}, "math": math}
        compiled: Callable[..., tuple[Any, ...]] = eval(
            f"lambda {', '.join(self._names)}: ({body})", names
        )
        return compiled


def _varies(view: TensorView) -> bool:
    return any(isinstance(n, Length) for n in (*view.shape, *view.stride, view.offset))


def _text(view: TensorView) -> str:
    def tuple_text(values: tuple[int, ...]) -> str:
        return "(" + "".join(f"{_formula(v)}, " for v in values) + ")"

    return f"({tuple_text(view.shape)}, {tuple_text(view.stride)}, {_formula(view.offset)})"


def _formula(value: int) -> str:
    return f"({value.formula})" if isinstance(value, Length) else str(value)
