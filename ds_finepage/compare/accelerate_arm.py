"""The arm ``accelerate-map``: Accelerate's device map.

A device map keeps the first modules on the device. Their number is the setting
``modules_on_device``, which a simulation of both passes has found. An accelerator tries it, and
takes fewer until the peak is within the budget.

If the ds_config has ``offload_param.pin_memory``, the weights are pinned, which Accelerate itself
does not do.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import dispatch_model, hooks

from ds_finepage import _compat
from ds_finepage.compare.engine import Engine, RunRequest
from ds_finepage.compare.loading import load_model
from ds_finepage.errors import ConfigError
from ds_finepage.execution.device import device_of
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.graph.taskgraph import block_of
from ds_finepage.integrations.deepspeed.patches import exchanged

KEPT = "modules_on_device"
TRIAL_TOKENS = 2


def load(request: RunRequest) -> Engine:
    """Load the model into host memory, and choose the modules that stay on the device.

    Raises:
        ConfigError: A module has weights beside those of its submodules, so that no device map can
            place them.
    """
    model, device = load_model(request), torch.device(request.device)
    is_accelerator = device_of(device).is_accelerator
    engine = DeviceMapEngine(model, device, int(request.settings.get(KEPT, 0)))
    if is_accelerator:
        engine.try_out(request)
    if is_accelerator and pins_weights(request.ds_config):
        engine.pin()
    return engine


class DeviceMapEngine(Engine):
    """A model under ``dispatch_model``; nothing is copied back."""

    def __init__(self, model: Any, device: torch.device, num_modules: int) -> None:
        """Take a model, and the number of modules that stay on the device.

        Args:
            model: The model, with its weights in host memory.
            device: Where it computes.
            num_modules: How many, from the first on.

        Raises:
            ConfigError: A module has weights beside those of its submodules.
        """
        super().__init__(model, device)
        self._modules = map_modules_of(model)
        self.settings[KEPT] = min(num_modules, len(self._modules))

    def pin(self) -> None:
        """Move the weights to pinned host memory."""
        for parameter in self.model.parameters():
            parameter.data = parameter.data.pin_memory()
        self.notes.append("weights pinned, as offload_param.pin_memory says")

    def counting(self) -> AbstractContextManager[None]:
        """Inside, a fetch is a copy and counts; Accelerate fetches by one function."""
        original = getattr(hooks, _compat.ACCELERATE_SET)

        def counted(
            module: torch.nn.Module, name: str, device: Any, value: Any = None, **more: Any
        ) -> None:
            tied: Mapping[Any, Any] = more.get("tied_params_map") or {}
            is_there = value is not None and device in tied.get(value.data_ptr(), ())
            original(module, name, device, value=value, **more)
            if value is None or is_there or str(device) == "meta":
                return
            fetched = module.get_parameter(name)
            self.fetched_bytes += fetched.nbytes
            if fetched.data_ptr() == value.data_ptr():
                fetched.data = fetched.data.clone()

        return exchanged(hooks, _compat.ACCELERATE_SET, counted)

    def close(self) -> None:
        """Take the hooks off; the weights are in host memory again, and tied."""
        hooks.remove_hook_from_module(self.model, recurse=True)
        if hasattr(self.model, "hf_device_map"):
            del self.model.hf_device_map
        drop_own_forwards(self.model)
        self.model.to("cpu")
        self.model.tie_weights()

    def place(self) -> None:
        """Dispatch the model; on the CPU, modules that stay become copies."""
        kept = list(self._modules)[: int(self.settings[KEPT])]
        here, is_cpu = str(self.device), self.device.type == "cpu"
        if is_cpu:
            for name in kept:
                for parameter in self._modules[name]:
                    parameter.data = parameter.data.clone()
        # On the CPU, "cpu" is where a module computes. One on the "disk" is fetched from the state
        # dict, which is in host memory.
        away = "disk" if is_cpu else "cpu"
        places = {
            name: here if owner is None or owner in kept else away
            for name, owner in modules_to_place(self.model).items()
        }
        fetches = away in places.values()
        state = {n: t for n, t in self.model.state_dict().items() if places[block_of(n)] == away}
        dispatch_model(
            self.model,
            places,
            main_device=here,
            state_dict=state if fetches else None,
            offload_index={} if fetches and is_cpu else None,
            force_hooks=fetches,
        )

    def try_out(self, request: RunRequest) -> None:
        """Generate; while that takes more than the budget, keep fewer modules on the device."""
        while self.settings[KEPT] and not self._fits(request):
            self.settings[KEPT] = int(self.settings[KEPT]) - 1

    def _fits(self, request: RunRequest) -> bool:
        ids = torch.zeros(request.batch, request.prompt_tokens, dtype=torch.long)
        try:
            with DeviceMeter(self.device) as meter, self.counting():
                self.place()
                with torch.no_grad():
                    self.model.generate(
                        ids.to(self.device),
                        attention_mask=torch.ones_like(ids).to(self.device),
                        max_new_tokens=TRIAL_TOKENS,
                        min_new_tokens=TRIAL_TOKENS,
                        do_sample=False,
                    )
        except torch.OutOfMemoryError:
            return False
        finally:
            self.close()
        return meter.peak_bytes <= request.budget_bytes


def drop_own_forwards(model: torch.nn.Module) -> None:
    """Delete the attribute ``forward`` of modules where it is the method of their class again."""
    for module in model.modules():
        own = vars(module).get("forward")
        if getattr(own, "__func__", None) is type(module).forward:
            del module.forward


def map_modules_of(model: torch.nn.Module) -> dict[str, list[torch.nn.Parameter]]:
    """Return the weights of each map module by its name, in the order of the model."""
    found: dict[str, list[torch.nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        found.setdefault(block_of(name), []).append(parameter)
    return found


def modules_to_place(model: torch.nn.Module) -> dict[str, str | None]:
    """Return the modules of a device map, each with the one that it goes with.

    A module whose weights are tied goes with the one that has them; None stands for a module
    without weights.

    Raises:
        ConfigError: A module has weights or buffers beside those of its submodules.
    """
    owners = {id(p): name for name, found in map_modules_of(model).items() for p in found}
    places: dict[str, str | None] = {name: name for name in owners.values()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(block_of(name), owners[id(parameter)])
    for name, _ in model.named_buffers():
        places.setdefault(block_of(name), None)
    for name in places:
        if not name or any(other.startswith(f"{name}.") for other in places):
            raise ConfigError(
                f"{name or 'the model itself'} has weights or buffers beside those of its "
                "submodules, so no device map can place it"
            )
    return places


def pins_weights(ds_config: Mapping[str, Any]) -> bool:
    """Return whether a ds_config asks for weights in pinned memory."""
    offload = ds_config.get("zero_optimization", {}).get("offload_param", {})
    return bool(offload.get("pin_memory"))
