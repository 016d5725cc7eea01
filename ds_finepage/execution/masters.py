"""Host weights: parameters, and large buffers, whose bytes stay in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.parameter import is_lazy

from ds_finepage.errors import StoreError
from ds_finepage.execution.arena import byte_view
from ds_finepage.execution.collectives import RankParts
from ds_finepage.execution.device import device_of
from ds_finepage.execution.disk import FileRange, files_of
from ds_finepage.execution.watch import data_of, is_watched, set_data


@dataclass(eq=False, slots=True)
class HostWeight:
    """One parameter and its master.

    Attributes:
        name: Qualified name in the module.
        parameter: The parameter, or a buffer that is a weight; identity is by this object.
        master: The parameter's bytes in host memory, 1-d uint8.
        shape: Full shape.
        stride: Strides of the full tensor, dense.
        dtype: Element type.
        restore: Detach calls it with this object, to restore the parameter.
        gathered: For a master that is ZeRO's own partition: returns True while ZeRO has gathered
            the parameter. None for every other master.
        parts: For a master that is this rank's part of the weight: the ranks. None where it is the
            whole weight.
        source: For a master that is a mapped file, and takes no host memory: the bytes of the file.
            None for every other master.
    """

    name: str
    parameter: torch.Tensor
    master: torch.Tensor
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    restore: Callable[[HostWeight], None]
    gathered: Callable[[], bool] | None = None
    parts: RankParts | None = None
    source: FileRange | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device; all parts have the same size, so there may be some at the end."""
        return self.master.numel() * (1 if self.parts is None else self.parts.num_ranks)

    def copy_to(self, target: torch.Tensor) -> None:
        """Copy the weight; of a weight in parts every rank has to do this.

        It goes to 1-d uint8 of ``nbytes``.

        Raises:
            RankError: Another rank is gone.
        """
        own = target if self.parts is None else self.parts.own(target)
        own.copy_(self.master, non_blocking=True)
        if self.parts is not None:
            self.parts.collect(target)

    @property
    def value(self) -> torch.Tensor:
        """The master as a tensor of the weight's shape."""
        return self.shaped(self.master)

    def shaped(self, flat: torch.Tensor) -> torch.Tensor:
        """Return bytes of the weight, on any device, as a tensor of its shape."""
        with torch.inference_mode(False), torch.no_grad():
            flat = flat.view(self.dtype)
            return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    def has_form_of(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor has the weight's shape, strides and dtype."""
        return (
            tensor.dtype == self.dtype
            and tuple(tensor.shape) == self.shape
            and (tensor.stride() == self.stride or tensor.numel() <= 1)
        )


def weights_of(named: Mapping[str, torch.Tensor], device: torch.device) -> list[HostWeight]:
    """Make masters of plain parameters: their own data if it is in host memory, else a copy.

    Args:
        named: Qualified name -> parameter, each parameter once.
        device: The device that computes. Masters for an accelerator are pinned.

    Raises:
        StoreError: A parameter has no data (it is on the meta device, its storage is empty, or it
            is not initialized), is sparse, or belongs to an attached model.
    """
    for name, parameter in named.items():
        refuse_watched(name, parameter)
        if is_lazy(parameter):
            raise StoreError(
                f"parameter {name} is not initialized yet. Call the model once before attaching."
            )
        if parameter.layout is not torch.strided:
            raise StoreError(
                f"parameter {name} is sparse ({parameter.layout}), and plans copy dense weights "
                f"alone. Make it dense, or a buffer."
            )
        if parameter.is_meta:
            raise StoreError(
                f"parameter {name} is on the meta device and has no data. Load the weights first, "
                f"all of them into host memory: a device_map that offloads leaves some out."
            )
        if parameter.numel() and not parameter.untyped_storage().nbytes():
            raise StoreError(
                f"parameter {name} has a shape and no data: its storage was freed. "
                f"Load the weights first."
            )
    sources = sources_of([data_of(parameter) for parameter in named.values()], device)
    pairs = zip(named.items(), sources, strict=True)
    return [_plain_weight(name, parameter, device, source) for (name, parameter), source in pairs]


def sources_of(tensors: Sequence[torch.Tensor], device: torch.device) -> list[FileRange | None]:
    """Return the bytes of files that may be masters for a device; None for each that has none.

    transformers asks the first parameter where the model is, so that one is in host memory.
    """
    sources = files_of(tensors)
    if sources and device_of(device).is_accelerator:
        sources[0] = None
    return sources


def refuse_watched(name: str, parameter: torch.Tensor) -> None:
    """Refuse a parameter of an attached model.

    Raises:
        StoreError: The parameter belongs to an attached model.
    """
    if is_watched(parameter):
        raise StoreError(
            f"parameter {name} belongs to a model that ds_finepage is attached to; detach it first"
        )


def _plain_weight(
    name: str, parameter: torch.Tensor, device: torch.device, source: FileRange | None
) -> HostWeight:
    before = data_of(parameter)
    host = _host_tensor(before)
    # On the CPU detach restores the parameter's own memory; elsewhere it gives the host copy.
    strided = dense = None
    if before.is_cpu and not device_of(device).is_accelerator and not _overlaps(before):
        strided, dense = before, host

    def restore(weight: HostWeight) -> None:
        value = weight.value
        if strided is not None and dense is not None and weight.has_form_of(dense):
            if strided.data_ptr() != value.data_ptr():
                with torch.inference_mode(False), torch.no_grad():
                    strided.copy_(value)
            value = strided
        set_data(parameter, value)

    where = device if source is None else before.device  # a mapped file is left as it is
    weight = HostWeight(name, parameter, *_form_of(host, where), restore, source=source)
    if source is None and before.is_cpu and device_of(device).is_accelerator:
        set_data(parameter, weight.value)  # so that one weight at a time is there twice
    return weight


def rehome(weight: HostWeight, value: torch.Tensor, device: torch.device) -> None:
    """Make a tensor the master of a weight.

    The weight takes the shape, strides and dtype of the tensor, which is on any device.
    """
    form = _form_of(_host_tensor(value), device)
    weight.master, weight.shape, weight.stride, weight.dtype = form


def _overlaps(tensor: torch.Tensor) -> bool:
    """Tell whether elements of a tensor may share memory, as those of an expanded one do."""
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < extent:
                return True
            extent = stride * size
    return False


def _host_tensor(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor as a dense one in host memory: itself if it is one."""
    with torch.inference_mode(False), torch.no_grad():
        host = value.detach().cpu()
        return host if torch.ops.aten.is_non_overlapping_and_dense(host) else host.contiguous()


def _form_of(
    host: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Return the master of a dense tensor in host memory, and its shape, strides and dtype."""
    with torch.inference_mode(False), torch.no_grad():
        master = byte_view(host.as_strided((host.numel(),), (1,), host.storage_offset()))
        if master.is_inference():  # only inference mode could write it
            master = master.clone()
    return device_of(device).pinned(master), tuple(host.shape), host.stride(), host.dtype
