"""The seam into transformers' loading: two methods wrapped, two names exchanged.

Under ZeRO stage 3 ``from_pretrained`` builds the model in partitions, maps every file of the
checkpoint, and gathers the parameters of each module to copy into them: partitions, file pages and
gathered copies are in memory together. Where the active ``HfDeepSpeedConfig`` enables finepage, on
one rank, tensors of safetensors files are read piece by piece, straight into the partitions.
Transformers itself still decides which tensor goes where: names, conversions, ties, missing keys.
Where the ``finepage`` section asks for packed weights, transformers gets our quantiser and leaves
ZeRO's partitions out; DeepSpeed makes them of the packed weights. Every other load stays stock.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

from ds_finepage import _compat
from ds_finepage._compat.transformers import keeps_conversions
from ds_finepage.config import FinepageConfig, section_of
from ds_finepage.integrations.deepspeed.patches import exchanged, unwrap, wrap
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import METHOD
from ds_finepage.planning.policies import RUNNABLE

logger = logging.getLogger(__name__)

_one_at_a_time = threading.RLock()  # of two that overlap, one would leave its names behind


def install(modeling_utils: ModuleType) -> None:
    """Wrap the model class; a second call does nothing, nor does one that finds other names."""
    model_class: Any = getattr(modeling_utils, _compat.MODEL, None)
    members = {} if model_class is None else vars(model_class)
    missing = [name for name in _compat.MODEL_NEEDS if not hasattr(modeling_utils, name)]
    missing += [
        f"{_compat.MODEL}.{name}"
        for name in (_compat.MODEL_BUILD, _compat.MODEL_LOAD)
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
    if _loads_shards(modeling_utils):
        wrap(model_class, _compat.MODEL_FINISH, functools.partial(_finish, modeling_utils))


def uninstall(modeling_utils: ModuleType) -> None:
    """Unwrap the model class, and the choice of a quantiser."""
    unwrap(modeling_utils, _compat.MODEL_QUANTIZER)
    model_class = getattr(modeling_utils, _compat.MODEL, object)
    for name in (_compat.MODEL_BUILD, _compat.MODEL_LOAD, _compat.MODEL_FINISH):
        unwrap(model_class, name)


def _loads_shards(modeling_utils: ModuleType) -> bool:
    """Return whether this version of transformers can load for tensor parallelism."""
    model_class = getattr(modeling_utils, _compat.MODEL)
    return isinstance(vars(model_class).get(_compat.MODEL_FINISH), staticmethod)


def is_wanted_by_ranks(modeling_utils: ModuleType) -> bool:
    """Say whether the active ``HfDeepSpeedConfig`` asks for finepage and tensor parallelism.

    Raises:
        ConfigError: Its ``finepage`` section is not valid.
    """
    active = _active_config(modeling_utils)
    if not active.enabled or active.weights is not None or not _loads_shards(modeling_utils):
        return False
    tensor_parallel = modeling_utils.deepspeed_config().get("tensor_parallel") or {}
    return int(tensor_parallel.get("autotp_size", 1)) > 1


def is_wanted(modeling_utils: ModuleType) -> bool:
    """Say whether the active ``HfDeepSpeedConfig`` asks for finepage, and one rank is all.

    Raises:
        ConfigError: Its ``finepage`` section is not valid.
    """
    if not _active_config(modeling_utils).enabled:
        return False
    from deepspeed import comm

    return bool(comm.is_initialized() and comm.get_world_size() == 1)


def _active_config(modeling_utils: ModuleType) -> FinepageConfig:
    """Return the ``finepage`` section of the active ``HfDeepSpeedConfig``; if none, it is off."""
    if not modeling_utils.is_deepspeed_zero3_enabled():
        return FinepageConfig.from_ds_config(None, policies=RUNNABLE)
    section = section_of(modeling_utils.deepspeed_config())
    return FinepageConfig.from_ds_config(section, policies=RUNNABLE)


def _quantizer(
    modeling_utils: ModuleType,
    original: Callable[..., Any],
    _owner: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Give transformers our quantiser where the active ``HfDeepSpeedConfig`` asks for it."""
    active = _active_config(modeling_utils)
    asked = active.weights if active.enabled else None
    call = inspect.signature(original).bind(*args, **kwargs)
    own = getattr(call.arguments["config"], "quantization_config", None)
    if asked is None and (not isinstance(own, dict) or own.get("quant_method") != METHOD):
        return original(*args, **kwargs)
    from ds_finepage.integrations.transformers import packed_loading  # transformers knows it then

    if asked is None:
        return original(*args, **kwargs)
    call.arguments["quantization_config"] = packed_loading.asked_of(
        call.arguments["config"],
        call.arguments["quantization_config"],
        PackedForm.parse(asked, active.weights_group),
    )
    return original(*call.args, **call.kwargs)


def _build(
    modeling_utils: ModuleType,
    original: Callable[..., Any],
    _owner: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Add a mode to the contexts in which transformers builds a model before it loads weights."""
    if is_wanted_by_ranks(modeling_utils):
        with _as_without_zero(modeling_utils):
            return original(*args, **kwargs)
    contexts = original(*args, **kwargs)  # zero.Init is among them, which counts the ranks
    if is_wanted(modeling_utils):
        from ds_finepage.integrations.deepspeed.partitions import NothingIntoNothing

        contexts = [*contexts, NothingIntoNothing()]
    return contexts


def _load(
    modeling_utils: ModuleType,
    original: Callable[..., Any],
    _owner: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run transformers' loading with our reader and our gathering in place of the stock ones."""
    call = inspect.signature(original).bind(*args, **kwargs)
    if _is_packed(call.arguments.get("load_config")):
        return _load_packed(modeling_utils, original, call)
    if is_wanted_by_ranks(modeling_utils):
        return _load_unread(modeling_utils, original, call)
    if not is_wanted(modeling_utils):
        return original(*args, **kwargs)
    import deepspeed
    from transformers import core_model_loading
    from transformers.integrations import deepspeed as integration

    from ds_finepage.integrations.deepspeed.checkpoint_files import trim_heap
    from ds_finepage.integrations.deepspeed.partitions import PartitionsInPlace

    reader = functools.partial(_read_file, getattr(modeling_utils, _compat.MODEL_READ_FILE))
    fill = getattr(modeling_utils, _compat.MODEL_FILL)
    if keeps_conversions(integration):
        fill = functools.partial(_fill, getattr(core_model_loading, _compat.CONVERTER), fill)
    with (
        _one_at_a_time,
        exchanged(modeling_utils, _compat.MODEL_FILL, fill),
        exchanged(modeling_utils, _compat.MODEL_READ_FILE, reader),
        exchanged(deepspeed.zero, _compat.GATHERED_PARAMETERS, PartitionsInPlace),
    ):
        result = original(*args, **kwargs)
    trim_heap()
    return result


@contextlib.contextmanager
def _as_without_zero(modeling_utils: ModuleType) -> Iterator[None]:
    """Let transformers load as if ZeRO had no part in it."""
    with _one_at_a_time, exchanged(modeling_utils, _compat.IS_ZERO3, lambda: False):
        yield


def _load_unread(
    modeling_utils: ModuleType, original: Callable[..., Any], call: inspect.BoundArguments
) -> Any:
    """Run transformers' loading with tensors of safetensors files that are read later."""
    from ds_finepage.integrations.deepspeed.checkpoint_files import open_file
    from ds_finepage.integrations.deepspeed.deferred import DeferredTensor
    from ds_finepage.integrations.deepspeed.packed_files import merged

    options = call.arguments
    files = options["checkpoint_files"] or []
    if options["state_dict"] is None and all(file.endswith(".safetensors") for file in files):
        opened: Any = merged(map(open_file, files))
        if opened is not None:
            options["state_dict"] = {k: DeferredTensor.of(t.region) for k, t in opened.items()}
    with _as_without_zero(modeling_utils):
        return original(*call.args, **call.kwargs)


def _finish(
    modeling_utils: ModuleType,
    original: Callable[..., Any],
    _owner: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Let transformers tie and initialise weights, then take the memory of unread ones."""
    if not is_wanted_by_ranks(modeling_utils):
        return original(*args, **kwargs)
    from ds_finepage.integrations.deepspeed.shard_loading import leave_unread

    with _as_without_zero(modeling_utils):
        result = original(*args, **kwargs)
    leave_unread(inspect.signature(original).bind(*args, **kwargs).arguments["model"])
    return result


def _is_packed(load_config: Any) -> bool:
    """Tell whether a load packs weights, or finds them packed."""
    quantizer = getattr(load_config, "hf_quantizer", None)
    return quantizer is not None and quantizer.quantization_config.quant_method == METHOD


def _load_packed(
    modeling_utils: ModuleType, original: Callable[..., Any], call: inspect.BoundArguments
) -> Any:
    """Run transformers' loading with files that are read tensor by tensor, or with kept weights.

    Raises:
        ConfigError: A weight cannot be packed, or a kept file is not the one that it should be.
    """
    from ds_finepage.integrations.deepspeed.checkpoint_files import open_file, trim_heap
    from ds_finepage.integrations.deepspeed.packed_files import PackedFile, merged

    options = call.arguments
    quantizer, model = options["load_config"].hf_quantizer, options["model"]
    files = options["checkpoint_files"] or []
    new: PackedFile | None = None
    if options["state_dict"] is None and all(file.endswith(".safetensors") for file in files):
        folder = _active_config(modeling_utils).weights_dir
        if folder is not None and not quantizer.pre_quantized:
            form, dtype = quantizer.quantization_config.form, options["load_config"].dtype
            new = PackedFile(folder, model, files, form, dtype)
        kept = None if new is None else new.read()
        if kept is not None:
            new = None
            quantizer.expect_packed(model)
            options["load_config"] = replace(options["load_config"], weight_mapping=[])
        options["state_dict"] = kept or merged(map(open_file, files))
    result = original(*call.args, **call.kwargs)
    if quantizer.refusal is not None:
        raise quantizer.refusal
    if new is not None:
        new.write(model)
    trim_heap()
    return result


def _fill(
    converter: type,
    original: Callable[..., tuple[list[str], set[str]]],
    filled_model: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[list[str], set[str]]:
    """Copy into a model, and the results of each conversion before the next conversion runs.

    Args:
        converter: transformers' class of conversions.
        original: transformers' function that converts tensors and copies them into a model.
        filled_model: The model.
        args: The function's other arguments.
        kwargs: The function's other arguments by name.

    Returns:
        The messages of errors, and the names that got no tensor.
    """
    stock = getattr(converter, _compat.CONVERTER_CONVERT)
    filled: list[tuple[list[str], set[str]]] = []

    def convert(conversion: Any, name: str, model: Any = None, **options: Any) -> Any:
        made = stock(conversion, name, model, **options)
        if model is not filled_model:  # a load on another thread
            return made
        tensors = {key: t[0] if isinstance(t, list) else t for key, t in made.items()}
        filled.append(original(model, tensors))
        return {}

    with exchanged(converter, _compat.CONVERTER_CONVERT, convert):
        filled.append(original(filled_model, *args, **kwargs))
    errors, missing = zip(*filled, strict=True)
    return [message for messages in errors for message in messages], set.intersection(*missing)


def _read_file(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Open a safetensors file without reading it; anything else as stock does."""
    call = inspect.signature(original).bind(*args, **kwargs)  # the order depends on the version
    checkpoint_file = next(iter(call.arguments.values()))
    on_host = call.arguments.get("map_location", "cpu") == "cpu"
    if str(checkpoint_file).endswith(".safetensors") and on_host:
        from ds_finepage.integrations.deepspeed.checkpoint_files import open_file

        found = open_file(checkpoint_file)
        if found is not None:
            return found
    return original(*args, **kwargs)
