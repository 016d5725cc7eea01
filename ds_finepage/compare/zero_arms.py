"""The arms ``zero*``: stock ZeRO-Inference, each with its own settings.

The settings that the request brings are keys of ``zero_optimization``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from ds_finepage._compat.deepspeed import partition_parameters
from ds_finepage.compare.engine import Engine, RunRequest
from ds_finepage.compare.loading import form_of, load_model, load_unpacked
from ds_finepage.config import SECTION
from ds_finepage.integrations.deepspeed.one_process import prepare_one_process
from ds_finepage.integrations.deepspeed.patches import exchanged
from ds_finepage.packing.stock import pack_as_stock

ZERO = "zero_optimization"
TENSOR_PARALLEL = "tensor_parallel"


class DeepSpeedEngine(Engine):
    """A model that DeepSpeed runs; its weights are in ZeRO's host partitions.

    Attributes:
        engine: DeepSpeed's engine; None before :meth:`place`.
    """

    def __init__(self, model: Any, device: torch.device, ds_config: dict[str, Any]) -> None:
        """Take a model that was loaded under the ds_config.

        Args:
            model: The model.
            device: Where the engine wants the prompt.
            ds_config: The ds_config of the engine.
        """
        super().__init__(model, device)
        self.engine: Any = None
        self._ds_config = ds_config

    def place(self) -> None:
        """Let DeepSpeed take the model over."""
        self.engine, *_ = deepspeed.initialize(model=self.model, config=self._ds_config)
        self.model = self.engine.module.eval()

    def close(self) -> None:
        """Destroy DeepSpeed's engine."""
        if self.engine is not None:
            self.engine.destroy()


@contextmanager
def counting_fetches(add: Callable[[int], None]) -> Iterator[None]:
    """Count every fetch of stock DeepSpeed, and let it copy.

    One function of DeepSpeed fetches on a single rank. On the CPU it only gives the host partition
    another name. A counted fetch copies, as on a GPU, so that a meter sees it.

    Args:
        add: Takes the bytes of each weight that is fetched.
    """
    fetch: Callable[[list[Any]], Any] = partition_parameters._no_gather_coalesced

    def counted(params: Iterable[Any]) -> Any:
        params = list(params)
        handle = fetch(params)
        for param in params:
            add(param.ds_tensor.nbytes)
            if param.data.device == param.ds_tensor.device:
                param.data = param.data.clone()
        return handle

    with exchanged(partition_parameters, "_no_gather_coalesced", counted):
        yield


class ZeroEngine(DeepSpeedEngine):
    """Stock ZeRO-Inference; weights are dropped, so nothing goes to the host."""

    def counting(self) -> AbstractContextManager[None]:
        """Count every fetch, and let it copy."""
        return counting_fetches(self._add)

    def _add(self, nbytes: int) -> None:
        self.fetched_bytes += nbytes


def load_under_deepspeed(request: RunRequest, ds_config: Mapping[str, Any]) -> Any:
    """Load the model into ZeRO's host partitions, packed on its way if the ds_config says so.

    Args:
        request: The run.
        ds_config: The ds_config of the arm.
    """
    prepare_one_process()
    keep_alive = HfDeepSpeedConfig(dict(ds_config))
    model = load_unpacked(request)
    del keep_alive
    if form_of(ds_config) is not None:  # packed while it was loaded, and not yet in partitions
        deepspeed.zero.Init(module=model, config_dict_or_path=dict(ds_config))
    return model


def load_for_stock(request: RunRequest, ds_config: Mapping[str, Any]) -> Any:
    """Load the model into ZeRO's host partitions, packed before as DeepSpeed itself packs.

    DeepSpeed cuts a model over ranks before it partitions it, so on several ranks it does both
    later, in ``deepspeed.initialize``.

    Args:
        request: The run.
        ds_config: The ds_config of the arm.

    Raises:
        ConfigError: The packed form does not suit the model.
    """
    if int(ds_config.get(TENSOR_PARALLEL, {}).get("autotp_size", 1)) > 1:
        prepare_one_process()
        return load_unpacked(request)
    if form_of(request.ds_config) is None:
        return load_under_deepspeed(request, ds_config)
    prepare_one_process()
    model = load_model(request, pack_as_stock)
    deepspeed.zero.Init(module=model, config_dict_or_path=dict(ds_config))
    return model


def deepspeed_device() -> torch.device:
    """Return DeepSpeed's device."""
    return torch.device(get_accelerator().current_device_name())


def with_settings(request: RunRequest) -> dict[str, Any]:
    """Return the user's ds_config without finepage, and with the settings of the arm."""
    zero = {**request.ds_config[ZERO], **request.settings}
    return {**{k: v for k, v in request.ds_config.items() if k != SECTION}, ZERO: zero}


def load(request: RunRequest) -> ZeroEngine:
    """Load the model for stock ZeRO-Inference."""
    ds_config = with_settings(request)
    model = load_for_stock(request, ds_config)
    made = ZeroEngine(model, deepspeed_device(), ds_config)
    made.settings.update(request.settings)
    return made
