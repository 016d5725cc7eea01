"""Takes the place of DeepSpeed's parameter offload.

Imported only once DeepSpeed's engine is loaded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from ds_finepage._compat.deepspeed import (
    DeepSpeedZeRoOffload,
    InsertPostInitMethodToModuleSubClasses,
    ZeROOrderedDict,
    ZeroParamStatus,
    _init_external_params,
    is_zero_param,
)
from ds_finepage.api import attach
from ds_finepage.config import FinepageConfig
from ds_finepage.execution.arena import byte_view
from ds_finepage.execution.disk import FileRange
from ds_finepage.execution.masters import HostWeight, refuse_watched, sources_of, weights_of
from ds_finepage.execution.watch import data_of, set_data
from ds_finepage.integrations.deepspeed.patches import exchanged
from ds_finepage.integrations.deepspeed.ranks import parts_of, ranks_of_model
from ds_finepage.runtime.handle import Handle


class PlainParameters(ZeROOrderedDict):  # type: ignore[misc]
    """A module's parameters without ZeRO's gathering getter.

    The engine requires this type and its ``_in_forward`` flag, and sets both in every forward. The
    stock getter would gather a parameter at every access.
    """

    __getitem__ = OrderedDict.__getitem__


class FinepageOffload(DeepSpeedZeRoOffload):  # type: ignore[misc]
    """Runs plans in the place of the per-module hooks.

    Attributes:
        finepage: The handle; None before the hooks are set up, and after detach.
    """

    finepage_config: FinepageConfig
    finepage: Handle | None = None

    def setup_zero_stage3_hooks(self) -> None:
        """Attach finepage where stock DeepSpeed registers its hooks."""
        self._zero_parameters = [(m, m._parameters) for m in self.module.modules()]
        for module, parameters in self._zero_parameters:
            plain = PlainParameters(module)
            plain.update(parameters)
            module._parameters = plain
        self.finepage = attach(
            self.module,
            self.finepage_config,
            device=get_accelerator().current_device_name(),
            take=weights_of_zero,
            around_call=_plain_linear,
            ranks=ranks_of_model(self.module),
        )

    def _register_deepspeed_module(self, *_: Any) -> None:
        """Do nothing: libraries call this to bring stock hooks back."""

    def _register_hooks_recursively(self, *_: Any) -> None:
        """Do nothing: older versions of DeepSpeed use this name."""

    def detach_finepage(self) -> None:
        """Become stock ZeRO-Inference, which has no such method."""
        self._release()
        self._convert_new_parts()
        self.__class__ = DeepSpeedZeRoOffload
        self.setup_zero_stage3_hooks()

    def _remove_module_hooks(self) -> None:
        self._release()
        self.__class__ = DeepSpeedZeRoOffload

    def _release(self) -> None:
        assert self.finepage is not None
        self.finepage.detach()
        self.finepage = None
        for module, parameters in self._zero_parameters:
            now = dict(module._parameters)
            if list(now) != list(parameters) or any(now[n] is not p for n, p in parameters.items()):
                parameters.clear()  # the program replaced some
                parameters.update(now)
            module._parameters = parameters

    def _convert_new_parts(self) -> None:
        """Give ZeRO the modules and parameters that came while finepage was attached."""
        parameters: list[Any] = list(self.module.parameters())
        ours = [p for p in parameters if is_zero_param(p)]
        new = [p for p in parameters if not is_zero_param(p)]
        if ours and new:
            ours[0].convert_to_zero_parameters(param_list=new)
        for module in self.module.modules():
            if not hasattr(module, "ds_external_parameters"):
                _init_external_params(module)


def _plain_linear() -> AbstractContextManager[None]:
    """Give a call torch's own ``linear``.

    Each stock engine replaces it for good by an autograd function that rounds differently. Engines
    of both kinds may live side by side.
    """
    found = torch.nn.functional.linear
    plain = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", found)
    return exchanged(torch.nn.functional, "linear", plain)


def offload_class(config: FinepageConfig) -> type[FinepageOffload]:
    """Return the class to build, with its settings, since DeepSpeed passes only its own."""
    own = {"finepage_config": config}
    return type("ConfiguredFinepageOffload", (FinepageOffload,), own)


def weights_of_zero(named: Mapping[str, torch.Tensor], device: torch.device) -> list[HostWeight]:
    """Use ZeRO's own partitions as masters: each is the whole parameter, or this rank's part of it.

    A buffer, and a parameter that came later without ZeRO, get a master as in a plain module.

    Raises:
        StoreError: An attached model has a parameter already.
    """
    plain = {name: p for name, p in named.items() if not hasattr(p, "ds_tensor")}
    found = {id(w.parameter): w for w in weights_of(plain, device)}
    parted: dict[str, Any] = {name: p for name, p in named.items() if name not in plain}
    sources = sources_of([parameter.ds_tensor.data for parameter in parted.values()], device)
    for (name, parameter), source in zip(parted.items(), sources, strict=True):
        refuse_watched(name, parameter)
        found[id(parameter)] = _partition_weight(name, parameter, source)
    return [found[id(p)] for p in named.values()]


def _partition_weight(name: str, parameter: Any, source: FileRange | None) -> HostWeight:
    """Use ZeRO's partition as the master; a parameter that is in parts stays as ZeRO has it."""
    shape, partitioned = tuple(parameter.ds_shape), data_of(parameter)
    parts = parts_of(parameter)
    partition = parameter.ds_tensor.data
    if parts is None:
        partition = partition.narrow(0, 0, parameter.ds_numel)
    if partitioned.data_ptr() == partition.data_ptr():  # as a draft that has gone left it
        partitioned = partition.new_empty(0)

    def restore(weight: HostWeight) -> None:
        is_other = parts is None and weight.value.data_ptr() != partition.data_ptr()
        if is_other and tuple(weight.value.shape) == shape:
            with torch.inference_mode(False), torch.no_grad():
                partition.view(shape).copy_(weight.value)
        set_data(parameter, partitioned)

    return HostWeight(
        name,
        parameter,
        byte_view(partition),
        shape,
        torch.empty(shape, device="meta").stride(),
        partition.dtype,
        restore,
        gathered=lambda: parameter.ds_status is ZeroParamStatus.AVAILABLE,
        parts=parts,
        source=source,
    )
