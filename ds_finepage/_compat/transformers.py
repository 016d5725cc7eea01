"""Differences among the supported versions of transformers."""

from __future__ import annotations

from typing import Any


def is_initialized(layer: Any) -> bool:
    """Return whether a layer of a KV cache has its tensors; 4.56 has no attribute for it."""
    if hasattr(layer, "is_initialized"):
        return bool(layer.is_initialized)
    return getattr(layer, "keys", None) is not None


def max_length(layer: Any) -> int:
    """Return the most rows that a layer of a KV cache can hold; not positive if it can grow."""
    ask = getattr(layer, "get_max_length", None) or layer.get_max_cache_shape  # before 5.x
    return int(ask())
