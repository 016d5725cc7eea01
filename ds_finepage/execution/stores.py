"""Host masters: the one valid copy of every weight, and what stands in its place (floor 2).

While a model is attached each parameter keeps its full shape on the device but no bytes, so that
nothing in the model has to change and nothing is on the device that the plan did not put there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ds_finepage.errors import StoreError
from ds_finepage.execution.executor import byte_view

BLOCK_ALIGNMENT = 512


@dataclass(frozen=True, slots=True)
class HostWeight:
    """One parameter and its master.

    Attributes:
        name: Qualified name in the module.
        parameter: The parameter; identity is by this object.
        master: Its bytes in host memory, 1-d uint8.
        shape: Full shape.
        stride: Strides of the full tensor, dense.
        dtype: Element type.
        restore: Puts back what the parameter held before.
    """

    name: str
    parameter: torch.nn.Parameter
    master: torch.Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    restore: Callable[[], None]


class WeightTable:
    """All weights of a module, tied ones once."""

    def __init__(self, weights: Iterable[HostWeight], device: torch.device) -> None:
        """Take the weights over; call :meth:`install` to free their device bytes."""
        self._weights = list(weights)
        self._device = device
        self._parameters = [w.parameter for w in self._weights]
        self._num_elements = [_num_elements(w.shape) for w in self._weights]
        self.names = {id(w.parameter): w.name for w in self._weights}
        self.masters = {w.name: w.master for w in self._weights}
        self._is_full = False

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(w.master.numel() for w in self._weights)

    @property
    def block_bytes(self) -> int:
        """Bytes of all weights on the device at once, as :meth:`fill_all` places them."""
        return sum(-(-w.master.numel() // BLOCK_ALIGNMENT) for w in self._weights) * BLOCK_ALIGNMENT

    def install(self) -> None:
        """Give every parameter its full shape on the device, without bytes."""
        self._is_full = False
        for weight in self._weights:
            self._empty(weight)

    def restore(self) -> None:
        """Give every parameter back what it held before."""
        for weight in self._weights:
            weight.restore()

    def disturbed(self) -> list[str]:
        """Empty the parameters that somebody else resized; return their names.

        ``GatheredParameters`` leaves a parameter without its shape, and may have changed it.
        """
        now = list(map(torch.Tensor.numel, self._parameters))
        if now == self._num_elements:
            return []
        changed = [
            w for w, a, b in zip(self._weights, now, self._num_elements, strict=True) if a != b
        ]
        for weight in changed:
            self._empty(weight)
        return [w.name for w in changed]

    def fetch(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a full copy of a weight on the device, outside any plan."""
        for weight in self._weights:
            if weight.parameter is parameter:
                return _materialize(weight, self._device)
        raise StoreError("a parameter that was not there when the model was attached")

    def __contains__(self, parameter: object) -> bool:
        """Tell whether a parameter is one of ours."""
        return id(parameter) in self.names

    def fill(self, parameter: torch.nn.Parameter) -> None:
        """Give one parameter its bytes, for code that runs outside any plan."""
        parameter.data = self.fetch(parameter)

    def empty(self, parameter: torch.nn.Parameter) -> None:
        """Take the bytes of one parameter away again, unless all are to have theirs."""
        if self._is_full:  # graphs in the module's forward filled them, and others rely on that
            return
        for weight in self._weights:
            if weight.parameter is parameter:
                self._empty(weight)

    def fill_all(self) -> None:
        """Give every parameter its bytes on the device, until :meth:`install` frees them.

        They lie in one block, whose pages an operating system can make large ones.
        """
        try:
            self._fill_block()
        except BaseException:
            self.install()  # the plans count on their room
            raise
        self._is_full = True

    def _fill_block(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            block = torch.empty(self.block_bytes, dtype=torch.uint8, device=self._device)
            end = 0
            for weight in self._weights:
                nbytes = weight.master.numel()
                part = block[end : end + nbytes]
                part.copy_(weight.master, non_blocking=True)
                flat = part.view(weight.dtype)
                weight.parameter.data = flat.as_strided(
                    weight.shape, weight.stride, flat.storage_offset()
                )
                end += -(-nbytes // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT

    def _empty(self, weight: HostWeight) -> None:
        with torch.inference_mode(False):
            stand_in = torch.empty_strided(
                weight.shape, weight.stride, dtype=weight.dtype, device=self._device
            )
        stand_in.untyped_storage().resize_(0)
        weight.parameter.data = stand_in


def _materialize(weight: HostWeight, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        full = torch.empty_strided(weight.shape, weight.stride, dtype=weight.dtype, device=device)
        full.as_strided((weight.master.numel() // weight.dtype.itemsize,), (1,)).view(
            torch.uint8
        ).copy_(weight.master)
    return full


def _num_elements(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found


def weights_of_module(module: torch.nn.Module, device: torch.device) -> list[HostWeight]:
    """Take the masters from a plain module: its own data where that is in host memory already.

    Raises:
        StoreError: A parameter has no data (it is on the meta device, or was taken over already).
    """
    found = []
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise StoreError(
                f"parameter {name} is on the meta device and has no data; load the weights first"
            )
        if parameter.numel() and not parameter.untyped_storage().nbytes():
            raise StoreError(
                f"parameter {name} has a shape and no data. If ds_finepage is attached to the "
                f"model already, detach it first."
            )
        before = parameter.data
        data = before.cpu()
        if not torch.ops.aten.is_non_overlapping_and_dense(data):
            data = data.contiguous()
        flat = data.as_strided((data.numel(),), (1,), data.storage_offset())
        master = byte_view(flat)
        if device.type == "cuda" and not master.is_pinned():
            master = master.pin_memory()
        found.append(
            HostWeight(
                name,
                parameter,
                master,
                tuple(data.shape),
                data.stride(),
                data.dtype,
                _restorer(parameter, before if before.device.type == "cpu" else None, data),
            )
        )
    return found


def _restorer(
    parameter: torch.nn.Parameter, before: torch.Tensor | None, data: torch.Tensor
) -> Callable[[], None]:
    def restore() -> None:
        parameter.data = data if before is None else before

    return restore
