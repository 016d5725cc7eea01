"""Shows caches to their callers with transformers' own layers.

Callers compare the types of layers, and some accept only a ``DynamicLayer`` itself. So a cache has
a :class:`HostLayer` or a :class:`RoomLayer` only while the model runs. The caller gets the original
layer back. If the rows are in host memory, that is the state of a layer that transformers itself
has offloaded, so ``layer.prefetch()`` brings it to the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ds_finepage._compat.transformers import is_initialized
from ds_finepage.integrations.transformers.host_cache import HostLayer, move_to_host
from ds_finepage.integrations.transformers.room import RoomLayer, can_have_room

OwnLayer = HostLayer | RoomLayer


class HandedOut:
    """Swaps the layers of caches: the callers' own for those of a run, and back."""

    def __init__(self, *, pinned: bool) -> None:
        """Start without a cache; ``pinned`` host memory is for accelerators."""
        self._pinned = pinned
        # Cache -> pairs of the caller's layer and that of a run.
        self._pairs: weakref.WeakKeyDictionary[Cache, list[tuple[DynamicLayer, OwnLayer]]]
        self._pairs = weakref.WeakKeyDictionary()

    def move(self, cache: Cache) -> bool:
        """Move a cache to host memory; return False if there is nothing to move."""
        before = list(cache.layers)
        if not move_to_host(cache, pinned=self._pinned):
            return False
        pairs = self._pairs.setdefault(cache, [])
        for layer, now in zip(before, cache.layers, strict=True):
            if now is layer or not isinstance(now, HostLayer):
                continue
            if isinstance(layer, RoomLayer):
                pairs[:] = [(outside, now if own is layer else own) for outside, own in pairs]
            elif type(layer) is DynamicLayer:
                pairs.append((layer, now))
        return True

    def take(self, cache: Cache) -> None:
        """Put the layers of a run into a cache, with its current contents."""
        pairs = self._pairs.get(cache, [])
        for index, layer in enumerate(cache.layers):
            if type(layer) is not DynamicLayer:
                continue
            inside = next((own for outside, own in pairs if outside is layer), None)
            is_offloaded = _is_offloaded(layer)
            if isinstance(inside, RoomLayer) and not can_have_room(layer):
                pairs.remove((layer, inside))
                inside = None
            if inside is None:
                if is_offloaded:
                    inside = HostLayer(pinned=self._pinned)  # the cache is a copy of a moved one
                elif can_have_room(layer):
                    inside = RoomLayer()
                else:
                    continue
                pairs = self._pairs.setdefault(cache, [])
                pairs.append((layer, inside))
            inside.take(layer)
            cache.layers[index] = inside

    def hand_out(self, cache: Cache) -> list[torch.Tensor]:
        """Put the caller's layers back into a cache; rows in host memory stay there.

        Returns:
            The rows on the device that the caller gets.
        """
        rows: list[torch.Tensor | None] = []
        if cache.layer_class_to_replicate is not None:
            if issubclass(cache.layer_class_to_replicate, HostLayer):
                cache.layer_class_to_replicate = DynamicLayer
        pairs = self._pairs.get(cache, [])
        for index, layer in enumerate(cache.layers):
            if not isinstance(layer, (HostLayer, RoomLayer)):
                continue
            outside = next((outside for outside, own in pairs if own is layer), None)
            if outside is None:  # the forward made the layer
                outside = DynamicLayer()
                self._pairs.setdefault(cache, []).append((outside, layer))
            layer.give(outside)
            cache.layers[index] = outside
            if isinstance(layer, RoomLayer):
                rows += (outside.keys, outside.values)
        return [tensor for tensor in rows if tensor is not None]

    def bring_back(self) -> None:
        """Bring all caches to the device, without room, when the model is detached."""
        for pairs in list(self._pairs.values()):
            for outside, own in pairs:
                keys, values = outside.keys, outside.values
                if _is_offloaded(outside):
                    outside.prefetch()
                elif isinstance(own, RoomLayer) and keys is not None and values is not None:
                    outside.keys, outside.values = keys.contiguous(), values.contiguous()
        self._pairs.clear()


def own_layers(caches: Iterable[Cache]) -> list[OwnLayer]:
    """List the layers of caches that are those of a run."""
    layers = (layer for cache in caches for layer in cache.layers)
    return [layer for layer in layers if isinstance(layer, (HostLayer, RoomLayer))]


def _is_offloaded(layer: DynamicLayer) -> bool:
    keys = layer.keys
    return bool(is_initialized(layer) and keys is not None and keys.device != layer.device)
