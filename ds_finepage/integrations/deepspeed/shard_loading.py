"""Gives a loaded model the values of the tensors that transformers has left unread.

transformers builds the model without memory. On one rank its weights are read straight into ZeRO's
partitions. For tensor parallelism DeepSpeed's AutoTP cuts the model as it is. The view that AutoTP
leaves of a parameter tells which part the rank needs, and that part is read straight into the
master.

Imported only while a checkpoint is loaded, and by DeepSpeed's engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_finepage._compat.deepspeed import Init, PartitionedParamStatus, ZeroParamStatus
from ds_finepage.errors import ConfigError
from ds_finepage.execution.device import device_of
from ds_finepage.integrations.deepspeed.checkpoint_files import Region, trim_heap
from ds_finepage.integrations.deepspeed.deferred import (
    Call,
    DeferredTensor,
    Part,
    part_of,
    whole_of,
)
from ds_finepage.integrations.deepspeed.ranks import Meetings

PENDING = "finepage_pending"
"""The attribute of a parameter that is not read yet."""

OWN_ATTRIBUTES = ("origin", "is_alone", PENDING)
"""The attributes of an unread parameter that one with values has not."""


@dataclass(slots=True)
class Pending:
    """The values of a parameter that has none yet.

    Attributes:
        values: The whole parameter, not read.
        whole: In its shape, without memory; AutoTP leaves a view of it.
        part: The part that this rank needs, once AutoTP has cut the model.
    """

    values: DeferredTensor
    whole: torch.Tensor
    part: Part | None = None


def read_all(model: nn.Module) -> None:
    """Read the parameters and buffers of a model that are not read."""
    _give(model, {id(p): _alike(p, p.value()) for p in _deferred(model)})
    _read_buffers(model)


def leave_unread(model: nn.Module) -> None:
    """Give each unread parameter of a loaded model the shape of one without memory.

    Buffers are read.
    """
    made = {}
    for parameter in _deferred(model):
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        made[id(parameter)] = _alike(parameter, whole)
        setattr(made[id(parameter)], PENDING, Pending(parameter, whole))
    _give(model, made)
    _read_buffers(model)


def _deferred(model: nn.Module) -> list[Any]:
    return [parameter for parameter in model.parameters() if isinstance(parameter, DeferredTensor)]


def _read_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DeferredTensor):
                module._buffers[name] = buffer.value()


def _alike(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """Return a parameter with other data, and with the marks that others have put on one."""
    made = nn.Parameter(data, requires_grad=parameter.requires_grad)
    marks = {name: v for name, v in vars(parameter).items() if name not in OWN_ATTRIBUTES}
    vars(made).update(marks)
    return made


def _give(model: nn.Module, made: Mapping[int, nn.Parameter]) -> None:
    """Put new parameters wherever the old ones, known by their identity, are used."""
    for module in model.modules():
        for name, value in module._parameters.items():
            if id(value) in made:
                module._parameters[name] = made[id(value)]


def pending(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Pending]]:
    """Yield the parameters that are not read, with their names."""
    for name, parameter in model.named_parameters():
        found = getattr(parameter, PENDING, None)
        if found is not None:
            yield name, parameter, found


def note_parts(model: nn.Module) -> None:
    """Note which part of each parameter AutoTP has left.

    Raises:
        ConfigError: A parameter is no part of what it was.
    """
    for name, parameter, found in pending(model):
        found.part = part_of(found.whole, parameter.data)
        if found.part is None:
            raise ConfigError(
                f"{name} cannot be loaded shard by shard: AutoTP cuts it into more than one piece. "
                f"Load the model before HfDeepSpeedConfig is made."
            )


def refuse_unread(model: nn.Module) -> None:
    """Refuse a model that was loaded for tensor parallelism with finepage.

    Raises:
        ConfigError: Some parameters are not read.
    """
    for name, _, _ in pending(model):
        raise ConfigError(
            f"{name} is not read yet: the model was loaded under an HfDeepSpeedConfig with "
            f"finepage and tensor parallelism. Give the same ds_config to deepspeed.initialize."
        )


def read_parts(engine: Any, model: nn.Module) -> None:
    """Make the parameters of an unread model ZeRO's, with masters that are read now.

    Does nothing to a model that has its values.

    Args:
        engine: DeepSpeed's engine of the model.
        model: Cut by AutoTP; :func:`note_parts` was called.

    Raises:
        ConfigError: AutoTP has not cut the model.
        RankError: Another rank cannot read its weights.
        StoreError: A file of the checkpoint has changed.
    """
    found = [(parameter, each) for _, parameter, each in pending(model)]
    if not found:
        return
    if any(each.part is None for _, each in found):
        refuse_unread(model)
    init = Init(
        data_parallel_group=engine.mpu.get_data_parallel_group(),
        config_dict_or_path=engine._config._param_dict,
        mpu=engine.mpu,
    )
    _cast(model, _dtype_of(engine))
    _give_to_zero(model, init, found, _masters(found, init.pin_memory))


def read_whole(model: nn.Module, ds_config: Any, host_bytes: int) -> None:
    """Make the parameters of an unread model ZeRO's on one rank.

    Masters are read now. Where host memory has no room for all of them, they are mapped files.

    Args:
        model: As :func:`leave_unread` leaves it.
        ds_config: The active one.
        host_bytes: What the masters may take.

    Raises:
        StoreError: A file of the checkpoint has changed.
    """
    init = Init(config_dict_or_path=ds_config)
    _cast(model, init.dtype)
    found = [(parameter, each) for _, parameter, each in pending(model)]
    masters = []
    stays_in_files = sum(each.whole.nbytes for _, each in found) > host_bytes
    for parameter, each in found:
        each.part = whole_of(each.whole)
        master = _mapped(parameter, each) if stays_in_files else None
        masters.append(_master(parameter, each, init.pin_memory) if master is None else master)
    _give_to_zero(model, init, found, masters)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(init.local_device)


def _cast(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Cast what is to have the dtype of the ds_config; None leaves everything."""
    for parameter in model.parameters():
        if dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


def _give_to_zero(
    model: nn.Module,
    init: Any,
    found: Sequence[tuple[nn.Parameter, Pending]],
    masters: Sequence[torch.Tensor],
) -> None:
    """Make all parameters ZeRO's: those that were unread have their masters."""
    made = {
        id(parameter): _partitioned(init, parameter, master)
        for (parameter, _), master in zip(found, masters, strict=True)
    }
    _give(model, made)
    init._convert_to_zero_parameters(model.parameters())  # those that no checkpoint brought
    trim_heap()


def _dtype_of(engine: Any) -> torch.dtype | None:
    if engine.fp16_enabled():
        return torch.float16
    return torch.bfloat16 if engine.bfloat16_enabled() else None


def _masters(found: Sequence[tuple[nn.Parameter, Pending]], is_pinned: bool) -> list[torch.Tensor]:
    """Read the masters; a rank that cannot lets the others know."""
    meetings = Meetings()
    try:
        masters = [_master(*each, is_pinned) for each in found]
    except Exception as error:
        meetings.fail(error)
        raise
    meetings.gather(None)
    return masters


def _master(parameter: nn.Parameter, unread: Pending, is_pinned: bool) -> torch.Tensor:
    """Read the part of a parameter that this rank needs."""
    from deepspeed.accelerator import get_accelerator

    where = get_accelerator().current_device_name() if is_pinned else "cpu"
    nbytes = parameter.numel() * parameter.itemsize
    master = device_of(where).new_pinned(nbytes).view(parameter.dtype)
    assert unread.part is not None
    unread.values.read_into(master.view(parameter.shape), unread.part)
    return master


def _mapped(parameter: nn.Parameter, unread: Pending) -> torch.Tensor | None:
    """Return the bytes of a file that are a parameter as they are; None where they are not."""
    values: Any = unread.values
    while isinstance(values.origin, Call) and values.origin.part == whole_of(parameter):
        values = values.origin.args[0]  # a view
    region = values.origin
    if not isinstance(region, Region):
        return None
    is_other = (region.shape, region.dtype) != (tuple(parameter.shape), parameter.dtype)
    if is_other or region.offset % region.dtype.itemsize:  # a header of another length
        return None
    return region.mapped()


def _partitioned(init: Any, parameter: nn.Parameter, master: Any) -> Any:
    """Return a parameter of ZeRO on one rank, whose partition has its values already."""
    made: Any = _alike(parameter, master.view(parameter.shape))
    init._convert_to_deepspeed_param(made)
    master.ds_numel = made.ds_numel_aligned = made.ds_numel
    master.status, master.final_location = PartitionedParamStatus.AVAILABLE, None
    made.ds_tensor, made.ds_status = master, ZeroParamStatus.NOT_AVAILABLE
    made.data = torch.empty(0, dtype=made.dtype, device=init.local_device)
    return made
