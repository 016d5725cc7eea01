"""The seam into transformers' loading: methods wrapped, one name exchanged.

Under ZeRO stage 3 ``from_pretrained`` builds the model in partitions, maps every file of the
checkpoint, and gathers the parameters of each module to copy into them: partitions, file pages and
gathered copies are in memory together. Where the active ``HfDeepSpeedConfig`` enables finepage,
transformers loads as without ZeRO: it builds the model without memory, and gets the tensors of
safetensors files unread. It decides which tensor goes where: names, conversions, ties, missing
keys.

- On one rank they are then read piece by piece, straight into ZeRO's partitions.
- For tensor parallelism they stay unread until AutoTP has cut the model.
- Where the ``finepage`` section asks for packed weights, transformers gets our quantiser, which
  packs them as they are read; DeepSpeed makes its partitions of the packed weights.

Every other load stays stock.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ds_finepage import _compat
from ds_finepage.config import FinepageConfig, section_of
from ds_finepage.execution.host_memory import host_memory
from ds_finepage.integrations.deepspeed.checkpoint_files import trim_heap
from ds_finepage.integrations.deepspeed.deferred import open_files, value_of
from ds_finepage.integrations.deepspeed.patches import WrappedCall, exchanged, wrap
from ds_finepage.integrations.deepspeed.seam import with_cpu_offload
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import METHOD
from ds_finepage.planning.policies import POLICIES

logger = logging.getLogger(__name__)

_one_at_a_time = threading.RLock()  # of two that overlap, one would leave its names behind


def install(modeling_utils: ModuleType) -> None:
    """Wrap the model class; a second call does nothing, nor does one that finds other names."""
    model_class: Any = getattr(modeling_utils, _compat.MODEL, None)
    members = {} if model_class is None else vars(model_class)
    missing = [name for name in _compat.MODEL_NEEDS if not hasattr(modeling_utils, name)]
    missing += [
        f"{_compat.MODEL}.{name}"
        for name in _compat.MODEL_METHODS
        if not isinstance(members.get(name), (classmethod, staticmethod))
    ]
    if missing:
        logger.info(
            "checkpoints are loaded as by stock transformers: this version has no %s",
            ", ".join(missing),
        )
        return
    wrap(modeling_utils, _compat.MODEL_QUANTIZER, functools.partial(_quantizer, modeling_utils))
    wrap(model_class, _compat.MODEL_BUILD, functools.partial(_build, modeling_utils))
    wrap(model_class, _compat.MODEL_LOAD, functools.partial(_load, modeling_utils))
    wrap(model_class, _compat.MODEL_FINISH, functools.partial(_finish, modeling_utils))


def is_wanted(modeling_utils: ModuleType) -> bool:
    """Say whether the active ``HfDeepSpeedConfig`` asks for finepage, and for whole weights.

    With several ranks they must be those of tensor parallelism.

    Raises:
        ConfigError: Its ``finepage`` section is not valid.
    """
    active = _active_config(modeling_utils)
    if not active.enabled or active.weights is not None:
        return False
    if _is_for_ranks(modeling_utils):
        return True
    import deepspeed

    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed()  # as zero.Init does it in a stock load
    return bool(deepspeed.comm.get_world_size() == 1)


def _is_for_ranks(modeling_utils: ModuleType) -> bool:
    tensor_parallel = modeling_utils.deepspeed_config().get("tensor_parallel") or {}
    return int(tensor_parallel.get("autotp_size", 1)) > 1


def _active_config(modeling_utils: ModuleType) -> FinepageConfig:
    """Return the ``finepage`` section of the active ``HfDeepSpeedConfig``; if none, it is off."""
    if not modeling_utils.is_deepspeed_zero3_enabled():
        return FinepageConfig()
    section = section_of(modeling_utils.deepspeed_config())
    return FinepageConfig.from_dict(section, policies=POLICIES)


def _quantizer(modeling_utils: ModuleType, call: WrappedCall) -> Any:
    """Give transformers our quantiser where the active ``HfDeepSpeedConfig`` asks for it."""
    active = _active_config(modeling_utils)
    asked = active.weights if active.enabled else None
    own = getattr(call.arguments["config"], "quantization_config", None)
    if asked is None and (not isinstance(own, dict) or own.get("quant_method") != METHOD):
        return call.run()
    from ds_finepage.integrations.transformers import packed_loading  # transformers knows it then

    if asked is not None:
        call.arguments["quantization_config"] = packed_loading.asked_of(
            call.arguments["config"],
            call.arguments["quantization_config"],
            PackedForm.parse(asked, active.weights_group),
        )
    return call.run()


def _build(modeling_utils: ModuleType, call: WrappedCall) -> Any:
    """Choose the contexts in which transformers builds a model before it loads weights."""
    options = call.arguments
    is_stock = options["is_quantized"] or options["_is_ds_init_called"]
    if is_stock or not is_wanted(modeling_utils):
        return call.run()
    with _as_without_zero(modeling_utils):
        return call.run()


def _is_ours(modeling_utils: ModuleType, options: dict[str, Any]) -> bool:
    """Say whether :func:`_build` has built a model without ZeRO."""
    if getattr(options.get("load_config"), "hf_quantizer", None) is not None:
        return False
    in_zero = any(hasattr(parameter, "ds_id") for parameter in options["model"].parameters())
    return not in_zero and is_wanted(modeling_utils)


def _load(modeling_utils: ModuleType, call: WrappedCall) -> Any:
    """Run transformers' loading with unread tensors."""
    quantizer = getattr(call.arguments.get("load_config"), "hf_quantizer", None)
    if quantizer is not None and quantizer.quantization_config.quant_method == METHOD:
        quantizer.kept_in = _active_config(modeling_utils).weights_dir
        return _load_packed(call, quantizer)
    if not _is_ours(modeling_utils, call.arguments):
        return call.run()
    _leave_unread(call.arguments)
    with _as_without_zero(modeling_utils):
        result = call.run()
    trim_heap()
    return result


def _leave_unread(options: dict[str, Any]) -> None:
    """Let transformers load the tensors of safetensors files unread."""
    files = list(map(str, options.get("checkpoint_files") or ()))
    if options["state_dict"] is None and all(file.endswith(".safetensors") for file in files):
        options["state_dict"] = open_files(files)


@contextlib.contextmanager
def _as_without_zero(modeling_utils: ModuleType) -> Iterator[None]:
    """Let transformers load as if ZeRO had no part in it."""
    with _one_at_a_time, exchanged(modeling_utils, _compat.IS_ZERO3, lambda: False):
        yield


def _finish(modeling_utils: ModuleType, call: WrappedCall) -> Any:
    """Let transformers tie and initialise weights, then give unread ones to ZeRO, or to AutoTP."""
    if not _is_ours(modeling_utils, call.arguments):
        return call.run()
    from ds_finepage.integrations.deepspeed.shard_loading import leave_unread, read_whole

    with _as_without_zero(modeling_utils):
        result = call.run()
    model = call.arguments["model"]
    leave_unread(model)
    if not _is_for_ranks(modeling_utils):
        free_bytes, all_bytes = host_memory()
        budget = _active_config(modeling_utils).host_budget
        host_bytes = budget.resolve(held_bytes=0, free_bytes=free_bytes, all_bytes=all_bytes)
        read_whole(model, with_cpu_offload(modeling_utils.deepspeed_config()), host_bytes)
    return result


def _load_packed(call: WrappedCall, quantizer: Any) -> Any:
    """Run transformers' loading with files that are read tensor by tensor."""
    from ds_finepage.integrations.deepspeed.shard_loading import read_all

    _leave_unread(call.arguments)
    quantizer.read = value_of
    result = call.run()
    if quantizer.refusal is not None:
        raise quantizer.refusal
    read_all(call.arguments["model"])
    trim_heap()
    return result
