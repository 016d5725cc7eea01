"""KV offload: a KV cache that does not fit the device lies in host memory.

A :class:`HostLayer` replaces a dynamic layer of transformers inside the caller's cache object.
:class:`HandedOut` gives the callers their own layers back. Rows lie in host memory with tokens as
the first dimension, so the live rows are a prefix and new rows follow. The plan keeps a copy of
some layers on the device, and reloads the others. The forward appends the new rows on the device,
and returns them. Between two calls they are copied to the end of the live rows, so host memory has
all rows.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from ds_finepage._compat.transformers import (
    cache_name,
    given_cache,
    is_initialized,
    takes_cache,
)
from ds_finepage.errors import StoreError
from ds_finepage.execution.device import device_of
from ds_finepage.execution.host_ops import (
    HEADS_SECOND,
    TOKENS_FIRST,
    append,
    host_bytes,
    identify,
)
from ds_finepage.integrations.transformers.room import (
    RoomLayer,
    RunLayer,
    can_have_room,
    lengths_of,
)


class HostRows:
    """Rows of keys or of values in host memory, with room to grow.

    Attributes:
        live: The live rows, of shape (tokens, batch, heads, width); None without any.
        capacity: Rows that have room when they grow the next time.
    """

    def __init__(self) -> None:
        self.live: torch.Tensor | None = None
        self.capacity = 0
        self._room: torch.Tensor | None = None
        self._identity = object()  # of the rows that follow one another; a copy gets its own
        self._version = 0  # of the room, when we wrote it last

    @property
    def nbytes(self) -> int:
        """Bytes of the room."""
        return 0 if self._room is None else self._room.nbytes

    def larger_bytes(self, new: torch.Tensor | None) -> int:
        """Return the bytes of the room that new rows would need; 0 where they have room."""
        if new is None or not len(new):
            return 0
        after = len(new) + (0 if self.live is None else len(self.live))
        if self._room is not None and after <= len(self._room):
            return 0
        return max(self.capacity, after) * new[0].nbytes

    def put_in_place(self, device: torch.device) -> None:
        """Copy live rows into a room if they are not the first ones of it; a device uses them."""
        live = self.live
        if live is None or len(live) == 0:
            self.live = self._room = None
        elif self._room is None or not _is_prefix(live, self._room):
            self.live = self._room = None
            self.append(live, device)
        elif self._room._version != self._version:  # the caller wrote into its rows
            self._identity, self._version = object(), self._room._version
        if self.live is not None:
            identify(self.live, self._identity)

    def append(self, rows: torch.Tensor, device: torch.device) -> None:
        """Copy rows from any memory to the end of the live ones."""
        before = 0 if self.live is None else len(self.live)
        after = before + len(rows)
        if not before:
            self._identity = object()
        if self._room is None or after > len(self._room):
            self._grow(rows.shape, rows.dtype, after, device)
        assert self._room is not None
        with torch.inference_mode(False), torch.no_grad():
            self._room[before:after].copy_(rows)
            self.live, self._version = self._room[:after], self._room._version

    def select(self, sequences: torch.Tensor, device: torch.device) -> None:
        """Keep the live rows of these sequences of the batch, in this order, also repeatedly."""
        before = self.live
        if before is None:
            return
        self.live = None
        shape = (len(before), len(sequences), *before.shape[2:])
        self._grow(shape, before.dtype, len(before), device)
        assert self._room is not None
        with torch.inference_mode(False), torch.no_grad():
            self.live = self._room[: len(before)]
            torch.index_select(before, 1, sequences, out=self.live)
        self._identity, self._version = object(), self._room._version

    def _grow(
        self, shape: Sequence[int], dtype: torch.dtype, num_rows: int, device: torch.device
    ) -> None:
        capacity = max(self.capacity, num_rows)
        numel = capacity * math.prod(shape[1:])
        with torch.inference_mode(False), torch.no_grad():  # so that every mode can write it
            room = host_bytes(numel * dtype.itemsize, pinned=device_of(device).is_accelerator)
            room = room.view(dtype).view(capacity, *shape[1:])
            if self.live is not None:
                room[: len(self.live)].copy_(self.live)
        self._room = room


class HostLayer(RunLayer):
    """A layer of a dynamic cache whose rows are in host memory."""

    def __init__(self) -> None:
        self.key_rows, self.value_rows = HostRows(), HostRows()
        self.new_keys: torch.Tensor | None = None  # of the last forward
        self.new_values: torch.Tensor | None = None
        self.lengths = lengths_of(0, 0)
        self.is_initialized = False

    @property
    def keys(self) -> torch.Tensor | None:
        """The live keys in host memory, of shape (batch, heads, tokens, width)."""
        return None if self.key_rows.live is None else self.key_rows.live.permute(HEADS_SECOND)

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self.key_rows.live = _tokens_first(value)
        self.give_room(self.capacity)

    @property
    def values(self) -> torch.Tensor | None:
        """The live values in host memory, of shape (batch, heads, tokens, width)."""
        return None if self.value_rows.live is None else self.value_rows.live.permute(HEADS_SECOND)

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self.value_rows.live = _tokens_first(value)

    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_live, capacity = self.lengths.shape[0], self.lengths.shape[1]
        keys, self.new_keys = append(
            self.key_rows.live, key_states, num_live=num_live, capacity=capacity
        )
        values, self.new_values = append(
            self.value_rows.live, value_states, num_live=num_live, capacity=capacity
        )
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of live tokens."""
        return 0 if self.key_rows.live is None else self.key_rows.live.shape[0]

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put the sequences of the batch into another order, as beam search does."""
        self.prepare()
        for rows in (self.key_rows, self.value_rows):
            rows.select(beam_idx.to("cpu"), self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the rooms in host memory."""
        return self.key_rows.nbytes + self.value_rows.nbytes

    @property
    def larger_bytes(self) -> int:
        """Bytes of the rooms that the rows of the last forward need beside the present ones."""
        keys = self.key_rows.larger_bytes(self.new_keys)
        return keys + self.value_rows.larger_bytes(self.new_values)

    # Between two calls.

    def settle(self) -> None:
        """Copy the rows of the last forward to the end of the live ones."""
        if self.new_keys is not None and self.new_values is not None:
            self.prepare()
            device_of(self.device).synchronize_stream()  # their copies may still run
            self.key_rows.append(self.new_keys, self.device)
            self.value_rows.append(self.new_values, self.device)
            self.give_room(self.capacity)
        self.forget_new()

    def forget_new(self) -> None:
        """Forget the new rows of a failed forward."""
        self.new_keys = self.new_values = None

    def prepare(self) -> None:
        """Bring rows that the caller reordered or cut back into place."""
        if self.is_initialized:
            self.key_rows.put_in_place(self.device)
            self.value_rows.put_in_place(self.device)

    def give_room(self, capacity: int) -> None:
        """Let a plan have room for so many rows of keys, and as many of values."""
        self.lengths = lengths_of(self.get_seq_length(), capacity)
        self.key_rows.capacity = self.value_rows.capacity = capacity


def _tokens_first(rows: torch.Tensor | None) -> torch.Tensor | None:
    return None if rows is None or rows.numel() == 0 else rows.permute(TOKENS_FIRST)


def _is_prefix(live: torch.Tensor, of: torch.Tensor) -> bool:
    return (
        live.data_ptr() == of.data_ptr()
        and live.is_contiguous()
        and live.shape[1:] == of.shape[1:]
        and live.dtype == of.dtype
    )


def seen_lengths(caches: Iterable[Cache]) -> list[tuple[Cache, list[tuple[Any, int | None]]]]:
    """List caches, each with its layers and their lengths."""
    return [(cache, [(layer, _length(layer)) for layer in cache.layers]) for cache in caches]


def _length(layer: Any) -> int | None:
    return int(layer.get_seq_length()) if hasattr(layer, "get_seq_length") else None


def take_back(before: Sequence[tuple[Cache, Sequence[tuple[Any, int | None]]]]) -> bool:
    """Remove the rows that came since :func:`seen_lengths`; return False if that is impossible."""
    for cache, layers in before:
        del cache.layers[len(layers) :]  # a cache without a config gets its layers in the forward
        for layer, length in layers:
            if length is None or layer.get_seq_length() == length:
                continue
            if not isinstance(layer, DynamicLayer) or layer.is_sliding:
                return False
            if length:
                layer.crop(length - layer.get_seq_length())
            else:
                layer.reset()
    return True


def caches_among(values: Iterable[Any], *, growing: bool = False) -> list[Cache]:
    """List the caches among a call's arguments, also those inside an ``EncoderDecoderCache``.

    Args:
        values: The arguments.
        growing: Leave out the caches that the encoder's output fills once.
    """
    caches: list[Cache] = []
    for value in values:
        if isinstance(value, EncoderDecoderCache):
            caches.append(value.self_attention_cache)
            if not growing:
                caches.append(value.cross_attention_cache)
        elif isinstance(value, Cache):
            caches.append(value)
    return caches


def move_to_host(cache: Cache) -> bool:
    """Move a cache to host memory, in place; return False if there is nothing to move.

    Only layers that grow with every token are moved. A layer with a sliding window does not grow.
    """
    moved = False
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer or isinstance(layer, RoomLayer):
            cache.layers[index] = _moved(layer)
            moved = True
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = HostLayer
        moved = True
    return moved


def _moved(layer: DynamicLayer) -> HostLayer:
    found = HostLayer()
    found.outside = layer.outside if isinstance(layer, RoomLayer) else layer
    found.is_initialized = is_initialized(layer)
    if found.is_initialized:
        found.device = layer.device
        found.keys, found.values = layer.keys, layer.values
        layer.keys = layer.values = None  # free its device bytes before the next layer moves
        found.prepare()
    return found


class HandedOut:
    """Swaps the layers of caches: the callers' own for those of a run, and back.

    Callers compare the types of layers, and some accept only a ``DynamicLayer`` itself. So a cache
    has a :class:`HostLayer` or a :class:`RoomLayer` only while the model runs. The caller gets the
    original layer back. If the rows are in host memory, that is the state of a layer that
    transformers itself has offloaded, so ``layer.prefetch()`` brings it to the device.
    """

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


def with_cache(
    module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return a call's arguments with an empty cache if the model would make one itself."""
    config = getattr(module, "config", None)
    wants = kwargs.get("use_cache")
    wants = getattr(config, "use_cache", False) if wants is None else wants
    is_decoder = not getattr(config, "is_encoder_decoder", False)
    if not wants or not is_decoder or given_cache(kwargs) is not None or len(args) > 1:
        return kwargs
    if not takes_cache(module.forward):
        return kwargs
    return {**kwargs, cache_name(module.forward): DynamicCache(config=config)}


def _told(config: Any, name: str) -> Any:
    """Return a value of a config; None if it has none, or not the same for all layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # some configs refuse values that differ from layer to layer
        return None


def require_fitting(module: torch.nn.Module, cache: Cache) -> None:
    """Refuse a cache that cannot be one of this model's.

    Raises:
        StoreError: It has more layers than the model, or other heads.
    """
    config = getattr(module, "config", None)
    if config is None or not hasattr(config, "get_text_config") or config.is_encoder_decoder:
        return
    text = config.get_text_config(decoder=True)
    num_layers = _told(text, "num_hidden_layers")
    held = [layer for layer in cache.layers if is_initialized(layer)]
    if num_layers is not None and len(held) > num_layers:
        raise StoreError(
            f"the KV cache has {len(held)} layers and the model {num_layers}: it is the cache of "
            f"another model"
        )
    if hasattr(text, "kv_lora_rank"):
        return  # its keys have other widths than the config's heads
    shared, width = _told(text, "num_key_value_heads"), _told(text, "head_dim")
    for layer in held:
        keys = getattr(layer, "keys", None)
        if keys is None or keys.dim() != 4 or not isinstance(shared, int):
            continue
        if keys.shape[1] != shared or (isinstance(width, int) and keys.shape[3] != width):
            raise StoreError(
                f"the KV cache has keys of shape {tuple(keys.shape)}, and the model has "
                f"{shared} heads for keys"
                + (f" of width {width}" if isinstance(width, int) else "")
                + ": it is the cache of another model"
            )
