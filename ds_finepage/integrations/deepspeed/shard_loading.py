"""Loads a checkpoint for tensor parallelism: each rank reads its own shard.

transformers builds the model without memory, and converts tensors that are not read. DeepSpeed's
AutoTP cuts the model as it is. The view that it leaves of a parameter tells which part the rank
needs. That part is read straight into the master. A parameter that is not cut is read once for all
ranks of one machine, if masters are not pinned.

Imported only while a checkpoint is loaded, and by DeepSpeed's engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_finepage._compat.deepspeed import Init, PartitionedParamStatus, ZeroParamStatus
from ds_finepage.errors import ConfigError
from ds_finepage.integrations.deepspeed.checkpoint_files import trim_heap
from ds_finepage.integrations.deepspeed.deferred import DeferredTensor, Part, part_of, whole_of
from ds_finepage.integrations.deepspeed.node_memory import Whole, shared
from ds_finepage.integrations.deepspeed.ranks import Meetings

PENDING = "finepage_pending"
"""The attribute of a parameter that is not read yet."""


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

    @property
    def is_cut(self) -> bool:
        """Whether the rank needs less than the whole."""
        return self.part != whole_of(self.whole)


def leave_unread(model: nn.Module) -> None:
    """Give each deferred parameter of a loaded model the shape of one without memory.

    Buffers are read.
    """
    _replace(model, {id(p): _unread(p) for p in model.parameters() if _is_deferred(p)})
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DeferredTensor):
                module._buffers[name] = buffer.value()


def _is_deferred(parameter: nn.Parameter) -> bool:
    return isinstance(parameter.data, DeferredTensor)


def _unread(value: Any) -> nn.Parameter:
    whole = torch.empty(value.shape, dtype=value.dtype, device="meta")
    made = nn.Parameter(whole, requires_grad=value.requires_grad)
    made.__dict__.update(value.__dict__)  # marks of transformers
    del made.__dict__["origin"]
    setattr(made, PENDING, Pending(value, whole))
    return made


def _replace(model: nn.Module, made: Mapping[int, nn.Parameter]) -> None:
    """Put parameters in the place of others, wherever those are used.

    Args:
        model: Of the parameters.
        made: The new ones, by the identity of the old ones.
    """
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
    dtype = _dtype_of(engine)
    init = Init(
        data_parallel_group=engine.mpu.get_data_parallel_group(),
        config_dict_or_path=engine._config._param_dict,
        mpu=engine.mpu,
    )
    for parameter in model.parameters():
        if dtype is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    wanted = [Whole(p.numel(), p.dtype, partial(_read, each)) for p, each in found]
    masters = _masters(wanted, found, init.pin_memory)
    made = {
        id(parameter): _partitioned(init, parameter, master)
        for (parameter, _), master in zip(found, masters, strict=True)
    }
    _replace(model, made)
    init._convert_to_zero_parameters(model.parameters())  # those that no checkpoint brought
    trim_heap()


def _dtype_of(engine: Any) -> torch.dtype | None:
    """Return the dtype that DeepSpeed casts a model to."""
    if engine.fp16_enabled():
        return torch.float16
    return torch.bfloat16 if engine.bfloat16_enabled() else None


def _read(found: Pending, target: torch.Tensor) -> None:
    assert found.part is not None
    found.values.read_into(target.view([len(each) for each in found.part]), found.part)


def _masters(
    wanted: Sequence[Whole], found: Sequence[tuple[nn.Parameter, Pending]], is_pinned: bool
) -> list[torch.Tensor]:
    """Read the masters; those that are not cut are shared with the other ranks."""
    from deepspeed.accelerator import get_accelerator

    meetings = Meetings()
    # A cut may leave one rank the whole weight, and the others nothing.
    rows = meetings.gather([each.is_cut for _, each in found])
    is_shared = [not is_pinned and not any(of_ranks) for of_ranks in zip(*rows, strict=True)]
    masters: dict[int, torch.Tensor] = {}
    try:
        for i, weight in enumerate(wanted):
            if not is_shared[i]:
                master = torch.empty(weight.num_elements, dtype=weight.dtype)
                masters[i] = get_accelerator().pin_memory(master) if is_pinned else master
                weight.read_into(masters[i])
        shared_by_all = [i for i, each in enumerate(is_shared) if each]
        once = shared([wanted[i] for i in shared_by_all], meetings.rank, meetings.gather)
    except Exception as error:
        meetings.fail(error)
        raise
    masters.update(zip(shared_by_all, once, strict=True))
    return [masters[i] for i in range(len(wanted))]


def _partitioned(init: Any, parameter: nn.Parameter, master: Any) -> Any:
    """Return a parameter of ZeRO on one rank, whose partition has its values already."""
    made: Any = nn.Parameter(master.view(parameter.shape), requires_grad=parameter.requires_grad)
    made.__dict__.update(parameter.__dict__)  # marks of AutoTP
    delattr(made, PENDING)
    init._convert_to_deepspeed_param(made)
    master.ds_numel = made.ds_numel_aligned = made.ds_numel
    master.status, master.final_location = PartitionedParamStatus.AVAILABLE, None
    made.ds_tensor, made.ds_status = master, ZeroParamStatus.NOT_AVAILABLE
    made.data = torch.empty(0, dtype=made.dtype, device=init.local_device)
    return made
