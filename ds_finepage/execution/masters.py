"""One weight in host memory, and how a device sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_finepage.errors import StoreError
from ds_finepage.execution.arena import byte_view
from ds_finepage.execution.watch import data_of, is_watched, set_data


@dataclass(eq=False, slots=True)
class HostWeight:
    """One parameter and its master.

    Attributes:
        name: Qualified name in the module.
        parameter: The parameter; identity is by this object.
        master: Its bytes in host memory, 1-d uint8.
        shape: Full shape.
        stride: Strides of the full tensor, dense.
        dtype: Element type.
        restore: Gives the parameter back when the model is detached; called with this object.
        gathered: For a master that is ZeRO's own partition: tells whether ZeRO has gathered the
            parameter now. None for every other master.
    """

    name: str
    parameter: torch.nn.Parameter
    master: torch.Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    restore: Callable[[HostWeight], None]
    gathered: Callable[[], bool] | None = None

    @property
    def value(self) -> torch.Tensor:
        """The master as a tensor of the weight's shape."""
        with torch.inference_mode(False), torch.no_grad():
            flat = self.master.view(self.dtype)
            return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    @property
    def is_partition(self) -> bool:
        """True where the master is ZeRO's own partition."""
        return self.gathered is not None

    def is_gathered(self) -> bool:
        """Tell whether the parameter holds a tensor of ZeRO's that ZeRO will take away."""
        return self.gathered is not None and self.gathered()

    def has_form_of(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor has the weight's shape, strides and dtype."""
        return (
            tensor.dtype == self.dtype
            and tuple(tensor.shape) == self.shape
            and (tensor.stride() == self.stride or tensor.numel() <= 1)
        )


def weights_of(named: Mapping[str, torch.nn.Parameter], device: torch.device) -> list[HostWeight]:
    """Take the masters from plain parameters: their own data where that is in host memory.

    Args:
        named: Qualified name -> parameter, each parameter once.
        device: Where to compute. Masters for CUDA are pinned.

    Raises:
        StoreError: A parameter has no data (it is on the meta device, or its storage is empty), or
            an attached model has it already.
    """
    for name, parameter in named.items():
        refuse_watched(name, parameter)
        if parameter.is_meta:
            raise StoreError(
                f"parameter {name} is on the meta device and has no data; load the weights first"
            )
        if parameter.numel() and not parameter.untyped_storage().nbytes():
            raise StoreError(
                f"parameter {name} has a shape and no data. Its storage was freed by somebody; "
                f"load the weights first."
            )
    return [_plain_weight(name, parameter, device) for name, parameter in named.items()]


def weights_of_module(module: torch.nn.Module, device: torch.device) -> list[HostWeight]:
    """Take the masters of a whole module; see :func:`weights_of`."""
    return weights_of(dict(module.named_parameters()), device)


def refuse_watched(name: str, parameter: torch.Tensor) -> None:
    """Refuse a parameter of an attached model.

    Raises:
        StoreError: An attached model has it.
    """
    if is_watched(parameter):
        raise StoreError(
            f"parameter {name} belongs to a model that ds_finepage is attached to; detach it first"
        )


def _plain_weight(name: str, parameter: torch.nn.Parameter, device: torch.device) -> HostWeight:
    before = data_of(parameter)
    host = _host_tensor(before)
    # On the CPU a strided parameter gets its own memory back; elsewhere one host copy is enough.
    strided = before if before.device.type == "cpu" == device.type else None

    def restore(weight: HostWeight) -> None:
        value = weight.value
        if strided is not None and weight.has_form_of(host):
            if strided.data_ptr() != value.data_ptr():
                with torch.inference_mode(False), torch.no_grad():
                    strided.copy_(value)
            value = strided
        set_data(parameter, value)

    return HostWeight(
        name,
        parameter,
        _master_of(host, device),
        tuple(host.shape),
        host.stride(),
        host.dtype,
        restore,
    )


def rehome(weight: HostWeight, value: torch.Tensor, device: torch.device) -> None:
    """Make a tensor that a parameter was given the master of its weight.

    Args:
        weight: The weight; its shape, strides and dtype become those of the tensor.
        value: The tensor, on any device.
        device: Where to compute.
    """
    host = _host_tensor(value)
    weight.master = _master_of(host, device)
    weight.shape, weight.stride, weight.dtype = tuple(host.shape), host.stride(), host.dtype


def _host_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory, dense: itself where it is that already."""
    with torch.inference_mode(False), torch.no_grad():
        host = value.detach().cpu()
        return host if torch.ops.aten.is_non_overlapping_and_dense(host) else host.contiguous()


def _master_of(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        master = byte_view(host.as_strided((host.numel(),), (1,), host.storage_offset()))
        if master.is_inference():  # it could not be written outside of inference mode
            master = master.clone()
    if device.type == "cuda" and not master.is_pinned():
        master = master.pin_memory()
    return master


class _DeviceAddress:
    """Pinned host bytes as an array on CUDA: torch reads this protocol, and keeps the object."""

    def __init__(self, master: torch.Tensor) -> None:
        self.master = master
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (master.numel(),),
            "typestr": "|u1",
            "data": (master.data_ptr(), False),
            "version": 3,
        }


def device_view(weight: HostWeight, device: torch.device) -> torch.Tensor:
    """Return a weight as the device sees it in host memory, without a copy.

    On CUDA pinned memory has a device address. Memory that is not pinned is registered first, in
    place; it stays so for the life of the process.
    """
    if device.type != "cuda" or not weight.master.numel():
        return weight.value.to(device)  # the same tensor on the CPU
    if not weight.master.is_pinned():
        _register(weight.master)
    with torch.inference_mode(False), torch.no_grad():
        flat = torch.as_tensor(_DeviceAddress(weight.master), device=device).view(weight.dtype)
        return flat.as_strided(weight.shape, weight.stride)


def _register(master: torch.Tensor) -> None:
    status = torch.cuda.cudart().cudaHostRegister(master.data_ptr(), master.numel(), 0)
    torch.cuda.check_error(int(status))
