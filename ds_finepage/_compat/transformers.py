"""Differences among versions of transformers, and among its kinds of cache layers."""

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
    """Return whether a layer of a KV cache has its keys and values; linear attention has none."""
    return bool(getattr(layer, "is_initialized", False))


def batching_memory_bytes() -> int:
    """Return the device memory that continuous batching takes for free; a part is for its cache."""
    from transformers.generation.continuous_batching import requests, utils

    module = utils if hasattr(utils, _compat.BATCHING_MEMORY) else requests  # before 5.21
    _, total, reserved, allocated = getattr(module, _compat.BATCHING_MEMORY)()
    return int(total - max(reserved, allocated))
