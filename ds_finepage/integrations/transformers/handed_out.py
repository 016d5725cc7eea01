"""Shows caches in host memory to their callers with transformers' own layers.

Callers compare the types of layers, and some accept only a ``DynamicLayer`` itself. So a cache has
a :class:`HostLayer` only while the model runs. The caller gets the original layer back, with keys
and values in host memory. That is the state of a layer that transformers itself has offloaded, so
``layer.prefetch()`` brings it to the device.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache

from ds_finepage._compat.transformers import is_initialized
from ds_finepage.integrations.transformers.host_cache import HostLayer, move_to_host

CACHE_DEPTH = 4
"""The depth of tensors in a cache: its layers, their rows in host memory, the rows themselves."""


class HandedOut:
    """Swaps the layers of moved caches: the callers' own for those in host memory, and back."""

    def __init__(self, *, pinned: bool) -> None:
        """Start without a moved cache; ``pinned`` host memory is for accelerators."""
        self._pinned = pinned
        # Cache -> pairs of the caller's layer and the layer in host memory.
        self._pairs: weakref.WeakKeyDictionary[Cache, list[tuple[DynamicLayer, HostLayer]]]
        self._pairs = weakref.WeakKeyDictionary()

    def move(self, cache: Cache) -> bool:
        """Move a cache to host memory; return False if there is nothing to move."""
        outside = list(cache.layers)
        if not move_to_host(cache, pinned=self._pinned):
            return False
        pairs = self._pairs.setdefault(cache, [])
        for before, now in zip(outside, cache.layers, strict=True):
            if isinstance(now, HostLayer) and type(before) is DynamicLayer:
                pairs.append((before, now))
        return True

    def take(self, cache: Cache) -> None:
        """Put the layers in host memory into a moved cache, with its current contents."""
        pairs = self._pairs.get(cache, [])
        for index, layer in enumerate(cache.layers):
            if type(layer) is not DynamicLayer:
                continue
            inside = None
            if pairs:
                inside = next((host for outside, host in pairs if outside is layer), None)
            if inside is None:
                if not _is_offloaded(layer):
                    continue
                inside = HostLayer(pinned=self._pinned)  # the cache is a copy of a moved one
                self._pairs.setdefault(cache, []).append((layer, inside))
            inside.take(layer)
            cache.layers[index] = inside

    def hand_out(self, cache: Cache) -> None:
        """Put the caller's layers back into a cache; their rows stay in host memory."""
        if cache.layer_class_to_replicate is not None:
            if issubclass(cache.layer_class_to_replicate, HostLayer):
                cache.layer_class_to_replicate = DynamicLayer
        pairs = self._pairs.get(cache, [])
        for index, layer in enumerate(cache.layers):
            if not isinstance(layer, HostLayer):
                continue
            outside = next((outside for outside, host in pairs if host is layer), None)
            if outside is None:  # the forward made the layer
                outside = DynamicLayer()
                self._pairs.setdefault(cache, []).append((outside, layer))
            layer.give(outside)
            cache.layers[index] = outside

    def bring_back(self) -> None:
        """Bring all caches to the device, when the model is detached."""
        for cache in list(self._pairs):
            for layer in cache.layers:
                if type(layer) is DynamicLayer and _is_offloaded(layer):
                    layer.prefetch()
        self._pairs.clear()


def copied(values: Any, caches: Iterable[Cache]) -> Any:
    """Copy the caches among a call's arguments.

    Args:
        values: The positional and the keyword arguments, as a pair. Everything that is no cache is
            shared, tensors included.
        caches: The caches whose tensors are shared.
    """
    memo: dict[int, Any] = {}

    def keep(value: Any, depth: int) -> None:
        if isinstance(value, torch.Tensor):
            memo[id(value)] = value
        elif isinstance(value, (list, tuple)):
            for item in value:
                keep(item, depth)
        elif hasattr(value, "__dict__") and not isinstance(value, type) and depth:
            for item in vars(value).values():
                keep(item, depth - 1)

    owners = list(caches)
    for cache in owners:
        keep(cache, CACHE_DEPTH)
    args, kwargs = values
    own = (Cache, EncoderDecoderCache)

    def copy_of(value: Any) -> Any:
        return copy.deepcopy(value, memo) if isinstance(value, own) else value

    return tuple(map(copy_of, args)), {name: copy_of(value) for name, value in kwargs.items()}


def _is_offloaded(layer: DynamicLayer) -> bool:
    keys = layer.keys
    return bool(is_initialized(layer) and keys is not None and keys.device != layer.device)
