"""The seam into DeepSpeed: wraps methods of its engine.

``DeepSpeedEngine._configure_zero_optimizer`` builds a ``DeepSpeedZeRoOffload`` when ZeRO stage 3
runs without an optimizer. If the ds_config of the engine enables finepage, the name stands for a
subclass during that call. DeepSpeed passes its own arguments, so changes of those between its
versions do not matter. Every other engine stays stock.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from ds_finepage import _compat
from ds_finepage.config import FinepageConfig, section_of
from ds_finepage.errors import ConfigError
from ds_finepage.integrations.deepspeed.patches import WrappedCall, exchanged, wrap
from ds_finepage.integrations.deepspeed.ranks import compare_setups
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import is_packed, pack_model
from ds_finepage.planning.policies import POLICIES


def install(engine_module: ModuleType) -> None:
    """Wrap the engine class; a second call does nothing, nor does a module without the class."""
    engine_class = getattr(engine_module, _compat.ENGINE, None)
    if engine_class is not None:  # None: the module is being imported at this moment
        wrap(engine_class, _compat.ENGINE_SANITY_CHECK, _checked)
        wrap(engine_class, _compat.ENGINE_TAKE_MODEL, _taken)
        wrap(engine_class, _compat.ENGINE_CONFIGURE, functools.partial(_configured, engine_module))
        if _compat.ENGINE_CUT_MODEL in vars(engine_class):  # older versions have none
            wrap(engine_class, _compat.ENGINE_CUT_MODEL, _cut)


def _checked(call: WrappedCall) -> Any:
    """Refuse a setup that finepage does not support before DeepSpeed changes the model."""
    engine = call.owner

    def check() -> bool:
        config = config_of(engine)
        if config.enabled:
            refuse_unsupported(engine)
            offload = engine._config.zero_config.offload_param
            if _name(offload.device) == NVME:
                engine._config._param_dict = with_cpu_offload(engine._config._param_dict)
                offload.device = "cpu"
        return config.enabled

    compare_setups(engine._config._param_dict, check)
    return call.run()


def _cut(call: WrappedCall) -> Any:
    """Let DeepSpeed cut the model into the shards of the ranks; say so if it cannot."""
    if not config_of(call.owner).enabled:
        return call.run()
    from ds_finepage.integrations.deepspeed.shard_loading import note_parts

    model = call.arguments["model"]
    try:
        result = call.run()
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"DeepSpeed's AutoTP cannot cut {type(model).__name__} over the ranks: {error} Say in "
            f"tensor_parallel.partition_config how to cut its layers, or leave "
            f"tensor_parallel out: each rank then holds ZeRO's own part of every weight."
        ) from error
    note_parts(model)
    return result


def _taken(call: WrappedCall) -> Any:
    """Prepare a model before DeepSpeed moves and partitions it: pack it, take subclasses apart.

    They stay apart: DeepSpeed has no partitions of a subclass.
    """
    from ds_finepage.integrations.deepspeed.shard_loading import read_parts, refuse_unread

    config = config_of(call.owner)
    model = call.arguments["model"]
    if not config.enabled or config.weights is not None:
        refuse_unread(model)
    if not config.enabled:
        return call.run()
    from ds_finepage.execution.subclasses import TakenApart

    if config.weights is not None:
        _pack(model, PackedForm.parse(config.weights, config.weights_group, config.weights_dir))
    TakenApart(model)
    read_parts(call.owner, model)
    # DeepSpeed casts the model, which transformers refuses where it knows of quantised weights.
    # A cast leaves packed numbers as they are.
    knows = is_packed(model) and getattr(model, "is_quantized", False)
    with exchanged(model, "is_quantized", False) if knows else nullcontext():
        return call.run()


def _pack(model: Any, form: PackedForm) -> None:
    """Pack a model; refuse one that DeepSpeed has partitioned before that."""
    if not is_packed(model) and any(hasattr(p, "ds_tensor") for p in model.parameters()):
        raise ConfigError(
            "finepage.weights packs a model before ZeRO partitions it, and this one has "
            "partitions. Load it with from_pretrained after HfDeepSpeedConfig and import "
            "ds_finepage, or build it without deepspeed.zero.Init."
        )
    pack_model(model, form)


def _configured(engine_module: ModuleType, call: WrappedCall) -> Any:
    """Let an engine that enables finepage build a ``FinepageOffload``."""
    engine, config = call.owner, config_of(call.owner)
    if not config.enabled:
        return call.run()
    from ds_finepage.integrations.deepspeed.offload import offload_class

    check = getattr(engine, _compat.ENGINE_INPUT_CHECK, None)
    if check is not None:
        check.remove()  # it would run in the middle of a captured call; every pass is compared
    _keep_hooks_from_compiler(engine)
    with exchanged(engine_module, _compat.ENGINE_OFFLOAD, offload_class(config)):
        return call.run()


def _keep_hooks_from_compiler(engine: Any) -> None:
    """Let Dynamo skip the hooks of an engine on its model, which hold nothing to plan.

    They run before and after the captured forward. By itself Dynamo takes about a second to compile
    them. If it captures the call of the model with its hooks, they stay as they are.
    """
    import torch

    from ds_finepage._compat.torch import trace_rules

    model = engine.module
    if model._parameters or trace_rules.check(model.forward):
        return
    for name in _compat.ENGINE_HOOKS:
        handle: Any = getattr(engine, name, None)
        if handle is not None and handle.id in handle.hooks_dict_ref():
            hooks = handle.hooks_dict_ref()
            hooks[handle.id] = torch.compiler.disable(hooks[handle.id])


def config_of(engine: Any) -> FinepageConfig:
    """Read the ``finepage`` section of an engine's ds_config.

    ``engine.config`` may be a path in older versions, so the parsed form is asked.

    Raises:
        ConfigError: The section is not valid.
    """
    section = section_of(engine._config._param_dict)
    return FinepageConfig.from_dict(section, policies=POLICIES)


NVME = "nvme"


def _name(device: Any) -> str:
    return str(getattr(device, "value", device))


def with_cpu_offload(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a ds_config in which ZeRO itself swaps nothing: weights stay in their own files."""
    zero = settings.get("zero_optimization") or {}
    offload = zero.get("offload_param") or {}
    if offload.get("device") != NVME:
        return settings
    return {
        **settings,
        "zero_optimization": {**zero, "offload_param": {**offload, "device": "cpu"}},
    }


def refuse_unsupported(engine: Any) -> None:
    """Refuse an engine that finepage cannot serve.

    Raises:
        ConfigError: Says what, and which stock alternative there is.
    """
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator

    settings = engine._config._param_dict
    stock = "or set finepage.enabled to false for stock ZeRO-Inference"
    stage = engine._config.zero_optimization_stage
    if stage != 3:
        raise ConfigError(
            f"finepage replaces ZeRO stage 3's parameter fetching; zero_optimization.stage is "
            f"{stage}. Set it to 3, {stock}."
        )
    if engine.client_optimizer is not None or "optimizer" in settings:
        raise ConfigError(
            "finepage is for inference, and an optimizer was given. Call deepspeed.initialize "
            f"without optimizer (and without an optimizer section), {stock}."
        )
    num_ranks = comm.get_world_size()
    size = (settings.get("tensor_parallel") or {}).get("autotp_size", 1)
    if size not in (1, num_ranks):
        raise ConfigError(
            f"finepage runs on several ranks by tensor parallelism over all of them, or on ZeRO's "
            f"partitions without it; there are {num_ranks}, and tensor_parallel.autotp_size is "
            f"{size}. Set it to {num_ranks} or to 1, {stock}."
        )
    zero = settings.get("zero_optimization", {})
    for name in ("zero_hpz_partition_size", "mics_shard_size"):
        if num_ranks > 1 and zero.get(name, 1) > 1:
            raise ConfigError(
                f"finepage needs partitions over all ranks; unset zero_optimization.{name}, "
                f"{stock}."
            )
    offload = engine._config.zero_config.offload_param
    target = "none" if offload is None else _name(offload.device)
    if target not in ("cpu", NVME):
        raise ConfigError(
            f"finepage keeps weights in host memory, or in the files of a checkpoint; "
            f"zero_optimization.offload_param.device is {target!r}. Set it to 'cpu' or '{NVME}', "
            f"{stock}."
        )
    if engine._config.zero_config.zero_quantized_weights:
        raise ConfigError(
            f"finepage cannot read quantized partitions; unset zero_quantized_weights, {stock}."
        )
    wants_fp16 = settings.get("fp16", {}).get("enabled") is True
    if wants_fp16 and not get_accelerator().is_fp16_supported():
        raise ConfigError(
            f"fp16 is enabled, but {get_accelerator().device_name()} does not support it. "
            'Write "bf16": {"enabled": true} instead, or neither for float32.'
        )
