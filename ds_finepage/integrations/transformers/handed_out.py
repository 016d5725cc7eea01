"""Shows caches to their callers with transformers' own layers.

Callers compare the types of layers, and some accept only a ``DynamicLayer`` itself. So a cache has
a :class:`HostLayer` or a :class:`RoomLayer` only while the model runs. The caller gets the original
layer back. If the rows are in host memory, that is the state of a layer that transformers itself
has offloaded, so ``layer.prefetch()`` brings it to the device.
"""

from __future__ import annotations

import weakref

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ds_finepage._compat.transformers import is_initialized
from ds_finepage.integrations.transformers.host_cache import HostLayer
from ds_finepage.integrations.transformers.room import RoomLayer, RunLayer, can_have_room


class HandedOut:
    """Swaps the layers of caches: the callers' own for those of a run, and back."""

    def __init__(self) -> None:
        # A caller's layer -> the layer of its runs, while the caller has it.
        self._own: weakref.WeakKeyDictionary[DynamicLayer, RunLayer] = weakref.WeakKeyDictionary()

    def take(self, cache: Cache) -> None:
        """Put the layers of a run into a cache, with its current contents."""
        for index, layer in enumerate(cache.layers):
            if type(layer) is not DynamicLayer:
                continue
            inside = self._own.pop(layer, None)
            if isinstance(inside, RoomLayer) and not can_have_room(layer):
                inside = None
            if inside is None:
                if _is_offloaded(layer):
                    inside = HostLayer()  # the cache is a copy of a moved one
                elif can_have_room(layer):
                    inside = RoomLayer()
                else:
                    continue
            inside.take(layer)
            inside.outside = layer
            cache.layers[index] = inside

    def hand_out(self, cache: Cache) -> list[torch.Tensor]:
        """Put the callers' layers back into a cache; rows in host memory stay there.

        Returns:
            The rows on the device that the caller gets.
        """
        rows: list[torch.Tensor | None] = []
        if cache.layer_class_to_replicate is HostLayer:
            cache.layer_class_to_replicate = DynamicLayer
        for index, layer in enumerate(cache.layers):
            if not isinstance(layer, RunLayer):
                continue
            outside, layer.outside = layer.outside or DynamicLayer(), None
            layer.give(outside)
            self._own[outside] = layer
            cache.layers[index] = outside
            if isinstance(layer, RoomLayer):
                rows += (outside.keys, outside.values)
        return [tensor for tensor in rows if tensor is not None]

    def bring_back(self) -> None:
        """Bring all caches to the device, without room, when the model is detached."""
        for outside, own in list(self._own.items()):
            keys, values = outside.keys, outside.values
            if _is_offloaded(outside):
                outside.prefetch()
            elif isinstance(own, RoomLayer) and keys is not None and values is not None:
                outside.keys, outside.values = keys.contiguous(), values.contiguous()
        self._own.clear()


def _is_offloaded(layer: DynamicLayer) -> bool:
    keys = layer.keys
    return bool(is_initialized(layer) and keys is not None and keys.device != layer.device)
