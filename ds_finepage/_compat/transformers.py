"""Differences among the supported versions of transformers."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ds_finepage import _compat


def keeps_conversions(integration: ModuleType) -> bool:
    """Return whether a load holds the results of all conversions at once; versions before 5.23."""
    run = getattr(integration, _compat.CONVERSIONS, None)
    return inspect.isfunction(run) and not inspect.isgeneratorfunction(run)


def is_initialized(layer: Any) -> bool:
    """Return whether a layer of a KV cache has its tensors; 4.56 has no attribute for it."""
    if hasattr(layer, "is_initialized"):
        return bool(layer.is_initialized)
    return getattr(layer, "keys", None) is not None


def max_length(layer: Any) -> int:
    """Return the most rows that a layer of a KV cache can hold; not positive if it can grow."""
    ask = getattr(layer, "get_max_length", None) or layer.get_max_cache_shape  # before 5.x
    return int(ask())
