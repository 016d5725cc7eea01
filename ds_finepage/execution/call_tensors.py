"""The tensors of a pass that are outside the arena: arguments, outputs and constants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ds_finepage.errors import TaskMismatchError
from ds_finepage.execution.arena import place, view_of
from ds_finepage.execution.host_ops import host_bytes
from ds_finepage.execution.moving import MovingViews
from ds_finepage.graph.taskgraph import BufferKind, GraphOutput, TaskGraph


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
            if buffer_of[i.tensor].kind is not BufferKind.WEIGHT
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
