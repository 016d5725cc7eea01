"""Differences among versions of transformers, and among its kinds of cache layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, get_args

from transformers.cache_utils import Cache
from transformers.integrations import sdpa_attention
from transformers.utils.import_utils import is_torchdynamo_compiling

from ds_finepage import _compat

CACHE_NAMES = ("past_key_values", "cache")
"""Of the argument that is a KV cache; the second one in transformers' own models since 5.24."""


def takes_cache(forward: Callable[..., Any]) -> bool:
    """Return whether an argument of a forward is a KV cache, and not a model's own kind of cache.

    xLSTM has a class of its own, in an argument that has the name of other models' KV caches.
    """
    known = inspect.signature(forward).parameters
    return any(_may_be_cache(known[name].annotation) for name in CACHE_NAMES if name in known)


def _may_be_cache(annotation: Any) -> bool:
    """Return whether transformers' ``Cache`` is of an annotated type; True without a class."""
    kinds = [k for k in get_args(annotation) or (annotation,) if isinstance(k, type)]
    kinds = [k for k in kinds if k not in (NoneType, inspect.Parameter.empty)]
    return not kinds or any(issubclass(k, Cache) for k in kinds)


def cache_name(forward: Callable[..., Any]) -> str:
    """Return the name of a forward's KV cache, or what it would have been."""
    known = inspect.signature(forward).parameters
    return next((name for name in CACHE_NAMES if name in known), CACHE_NAMES[0])


def given_cache(kwargs: Mapping[str, Any]) -> Any:
    """Return the KV cache among the named arguments of a call, by either name; None without."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def is_initialized(layer: Any) -> bool:
    """Return whether a layer of a KV cache has its keys and values; linear attention has none."""
    return bool(getattr(layer, "is_initialized", False))


def attend_as_eager(on: bool) -> None:
    """Let compiled attention of one token do as in eager mode, or end that.

    Since 5.24 heads that share keys are one product there. Where it is compiled, each has a copy.
    """
    if hasattr(sdpa_attention, "pack_gqa"):
        asks = (lambda: False) if on else is_torchdynamo_compiling
        vars(sdpa_attention)[is_torchdynamo_compiling.__name__] = asks


def batching_memory_bytes() -> int:
    """Return the device memory that continuous batching takes for free; a part is for its cache."""
    from transformers.generation.continuous_batching import requests, utils

    module = utils if hasattr(utils, _compat.BATCHING_MEMORY) else requests  # before 5.21
    _, total, reserved, allocated = getattr(module, _compat.BATCHING_MEMORY)()
    return int(total - max(reserved, allocated))
