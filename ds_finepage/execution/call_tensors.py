"""The tensors of one call: views in its sizes, its arguments and outputs, and the constants.

A plan is made for the largest call of its kind. A smaller call uses views of the same extents in
smaller shapes. All formulas of a graph are one compiled function. It runs only when the sizes
change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ds_finepage.errors import TaskMismatchError
from ds_finepage.execution.arena import place, view_of
from ds_finepage.execution.host_ops import host_bytes
from ds_finepage.execution.ops import Patch
from ds_finepage.graph.taskgraph import (
    Buffer,
    BufferKind,
    GraphOutput,
    Length,
    TaskGraph,
    TensorView,
)


class MovingViews:
    """The tensors of a graph in the shapes of the current call."""

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        self._positions = [position for _, position in graph.symbols]
        self._names = [name for name, _ in graph.symbols]
        self._varying = frozenset(t.id for t in graph.tensors if _varies(t))
        self._sizes: tuple[int, ...] | None = None
        self._places: list[Patch] = []  # of numbers
        self._moved: dict[tuple[int, int, int], torch.Tensor] = {}
        buffers = [b for b in graph.buffers if isinstance(b.nbytes, Length)]
        self._planned = {b.id: int(b.nbytes) for b in buffers}
        self._nbytes = dict(self._planned)
        self._nbytes_of = self._compile([_formula(b.nbytes) for b in buffers])
        self._shape_of: dict[int, Callable[..., tuple[Any, ...]]] = {}
        self._views: dict[int, TensorView] = {}  # in these sizes
        self._fill: Callable[..., tuple[Any, ...]] | None = None

    def varies(self, tensor: int) -> bool:
        """Return True if a tensor's shape, strides or offset depend on the call."""
        return tensor in self._varying

    def view(self, tensor: int) -> TensorView:
        """Return a tensor of the graph in the shape that it has in the current call."""
        planned = self._graph.tensors[tensor]
        if self._sizes is None or tensor not in self._varying:
            return planned
        if tensor not in self._views:
            if tensor not in self._shape_of:
                self._shape_of[tensor] = self._compile(_texts(planned))
            shape = self._shape_of[tensor](*self._sizes)
            self._views[tensor] = TensorView(tensor, planned.buffer, planned.dtype, *shape)
        return self._views[tensor]

    def nbytes(self, buffer: Buffer) -> int:
        """Return the bytes of a buffer in the current call."""
        return self._nbytes.get(buffer.id, buffer.nbytes)

    def add(
        self, patch: Patch, storage_of: torch.Tensor | None = None, offset_bytes: int = 0
    ) -> None:
        """Fill a place for each call from now on.

        A tensor gets any tensor on its storage, and the begin of its buffer there. Places of the
        same tensor there share one, so that a call changes its shape once.
        """
        if patch.tensor is None:
            self._places.append(patch)
            return
        assert storage_of is not None
        key = patch.tensor, storage_of.data_ptr(), offset_bytes
        if key not in self._moved:
            # Without elements for now: rows of the planned sizes may end behind their room.
            planned = self._graph.tensors[patch.tensor]
            self._moved[key] = view_of(
                storage_of, replace(planned, shape=(0,), stride=(1,), offset=0)
            )
        patch.container[patch.key] = self._moved[key]

    def set_sizes(self, args: Sequence[Any]) -> bool:
        """Fill all places for the sizes of a call; return False if a buffer is too small."""
        sizes = tuple(args[position] for position in self._positions)
        if sizes == self._sizes or not self._positions:
            return True
        nbytes = dict(zip(self._planned, self._nbytes_of(*sizes), strict=True))
        if any(nbytes[b] > planned for b, planned in self._planned.items()):
            return False
        self._nbytes, self._sizes = nbytes, sizes
        self._views.clear()
        if self._fill is None:
            self._fill = self._compiled_fill()
        self._fill(*sizes)
        return True

    def _compiled_fill(self) -> Callable[..., tuple[Any, ...]]:
        """Return the function that fills all places: a call of a method for each of them."""
        texts: list[str] = []
        methods: list[Callable[..., Any]] = []
        for (tensor, _, offset_bytes), moved in self._moved.items():
            shape, stride, offset = _texts(self._graph.tensors[tensor])
            begin = offset_bytes // moved.element_size()
            texts.append(f"do[{len(methods)}]({shape}, {stride}, {begin} + {offset})")
            methods.append(moved.as_strided_)
        for patch in self._places:
            assert patch.size is not None
            texts.append(f"do[{len(methods)}]({patch.key!r}, {_formula(patch.size)})")
            methods.append(patch.container.__setitem__)
        return self._compile(texts, do=methods)

    def _compile(self, texts: Sequence[str], **given: Any) -> Callable[..., tuple[Any, ...]]:
        body = "".join(f"{text}, " for text in texts)
        names = {"__builtins__": {"min": min, "max": max}, "math": math, **given}
        compiled: Callable[..., tuple[Any, ...]] = eval(
            f"lambda {', '.join(self._names)}: ({body})", names
        )
        return compiled


def _varies(view: TensorView) -> bool:
    return any(isinstance(n, Length) for n in (*view.shape, *view.stride, view.offset))


def _texts(view: TensorView) -> tuple[str, str, str]:
    def tuple_text(values: tuple[int, ...]) -> str:
        return "(" + "".join(f"{_formula(v)}, " for v in values) + ")"

    return tuple_text(view.shape), tuple_text(view.stride), _formula(view.offset)


def _formula(value: int) -> str:
    return f"({value.formula})" if isinstance(value, Length) else str(value)


class CallTensors:
    """Finds the caller's tensors for one call, makes its outputs, and holds the constants.

    It keeps no tensor of a call alive.
    """

    def __init__(
        self,
        graph: TaskGraph,
        sizes: MovingViews,
        *,
        device: torch.device,
        pinned: bool,
    ) -> None:
        """Copy the constants to the device."""
        self._graph, self._sizes = graph, sizes
        self._device, self._pinned = device, pinned
        buffer_of = [graph.buffers[t.buffer] for t in graph.tensors]
        self._arguments = [
            (i.position, i.tensor)
            for i in graph.inputs
            if buffer_of[i.tensor].kind not in (BufferKind.WEIGHT, BufferKind.MASTER)
        ]
        arguments = {buffer_of[tensor].id for _, tensor in self._arguments}
        self._on_host = [
            b for b in graph.buffers if b.kind is BufferKind.HOST and b.id not in arguments
        ]
        self._on_device = [b for b in graph.buffers if b.kind is BufferKind.OUTPUT]
        self._wanted = {o.tensor for o in graph.outputs if o.tensor is not None}
        with torch.inference_mode(False):
            self.constants = {
                b.id: torch.frombuffer(bytearray(b.payload or b"\0"), dtype=torch.uint8).to(device)
                for b in graph.buffers
                if b.kind is BufferKind.CONSTANT
            }

    def want(self, tensors: Iterable[int]) -> None:
        """Let :meth:`of_call` return these tensors of the graph too."""
        self._wanted.update(tensors)

    def of_call(self, args: Sequence[Any]) -> dict[int, torch.Tensor]:
        """Return the caller's tensors and new outputs, by tensor id.

        Raises:
            TaskMismatchError: An argument has another shape, or other strides, than planned.
        """
        view_of_call = self._sizes.view
        bases: dict[int, tuple[torch.Tensor, int]] = {}
        for position, tensor in self._arguments:
            view, arg = view_of_call(tensor), args[position]
            if arg.shape != view.shape or arg.stride() != view.stride:
                raise TaskMismatchError(
                    f"argument {position} of {self._graph.name} has shape "
                    f"{tuple(arg.shape)}, strides {arg.stride()}; captured were {view.shape}, "
                    f"{view.stride}. This is a fault of the plan's key; please report it."
                )
            bases[view.buffer] = (arg, (arg.storage_offset() - view.offset) * arg.element_size())
        for buffer in self._on_device:
            nbytes = self._sizes.nbytes(buffer)
            bases[buffer.id] = (torch.empty(nbytes, dtype=torch.uint8, device=self._device), 0)
        for buffer in self._on_host:
            bases[buffer.id] = (host_bytes(self._sizes.nbytes(buffer), pinned=self._pinned), 0)
        with torch.inference_mode(False), torch.no_grad():
            return {
                tensor: place(base[0], view_of_call(tensor), base[1])
                for tensor in self._wanted
                if (base := bases.get(self._graph.tensors[tensor].buffer)) is not None
            }

    def constant(self, tensor: int) -> torch.Tensor:
        """Return a tensor of a constant buffer."""
        view = self._sizes.view(tensor)
        return view_of(self.constants[view.buffer], view)

    def outputs(
        self, args: Sequence[Any], host_outputs: Sequence[Any], tensors: dict[int, torch.Tensor]
    ) -> tuple[Any, ...]:
        """Return the values that the call returns."""

        def value(output: GraphOutput) -> Any:
            if output.position is not None:
                return args[output.position]
            if output.host is not None:
                return host_outputs[output.host]
            if output.tensor is None:
                return None
            if output.tensor in tensors:
                return tensors[output.tensor]
            # The caller may change what it gets, so it gets a copy of a constant.
            return self.constant(output.tensor).clone()

        return tuple(map(value, self._graph.outputs))
