"""KV offload: a KV cache that does not fit the device lies in host memory.

A :class:`HostLayer` replaces a dynamic layer of transformers inside the caller's cache object.
:mod:`.handed_out` gives the callers their own layers back. Rows lie in host memory with tokens as
the first dimension, so the live rows are a prefix and new rows follow. The forward reloads the live
rows, appends the new ones on the device, and returns only the new ones. Between two calls the new
rows are copied to the end of the live rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, EncoderDecoderCache

from ds_finepage._compat.transformers import (
    cache_name,
    given_cache,
    is_initialized,
    name_dtype,
    takes_cache,
)
from ds_finepage.errors import StoreError
from ds_finepage.execution.device import device_of
from ds_finepage.execution.host_ops import host_bytes, to_device, to_host
from ds_finepage.integrations.transformers.room import RoomLayer, RunLayer

TOKENS_FIRST = (2, 0, 1, 3)
"""Permutes (batch, heads, tokens, width) to the order of host memory."""

HEADS_SECOND = (1, 2, 0, 3)
"""Permutes it back."""

MIN_ROWS = 64


class HostRows:
    """Rows of keys or of values in host memory, with room to grow.

    Attributes:
        live: The live rows, of shape (tokens, batch, heads, width), contiguous; None at first.
    """

    def __init__(self, *, pinned: bool) -> None:
        """Start empty."""
        self.live: torch.Tensor | None = None
        self._room: torch.Tensor | None = None  # ``live`` is a prefix of it
        self._pinned = pinned

    def set(self, live: torch.Tensor | None) -> None:
        """Copy rows from any memory, of shape (tokens, batch, heads, width)."""
        self.live = self._room = None
        if live is not None:
            self._grow(live.shape, live.dtype, len(live))
            self.append(live)

    def append(self, rows: torch.Tensor) -> None:
        """Copy rows to the end of the live ones."""
        before = 0 if self.live is None else len(self.live)
        after = before + len(rows)
        if self._room is None or after > len(self._room):
            self._grow(rows.shape, rows.dtype, after)
        assert self._room is not None
        with torch.inference_mode(False), torch.no_grad():
            self._room[before:after].copy_(rows)
            self.live = self._room[:after]

    def select(self, sequences: torch.Tensor) -> None:
        """Keep the live rows of these sequences of the batch, in this order, also repeatedly."""
        before = self.live
        if before is None:
            return
        self.live = self._room = None
        shape = (len(before), len(sequences), *before.shape[2:])
        self._grow(shape, before.dtype, len(before))
        assert self._room is not None
        with torch.inference_mode(False), torch.no_grad():
            self.live = self._room[: len(before)]
            torch.index_select(before, 1, sequences, out=self.live)

    def _grow(self, shape: Sequence[int], dtype: torch.dtype, num_rows: int) -> None:
        capacity = max(MIN_ROWS, 1 << (num_rows - 1).bit_length() if num_rows else 0)
        numel = capacity * math.prod(shape[1:])
        with torch.inference_mode(False), torch.no_grad():  # so that every mode can write it
            room = host_bytes(numel * dtype.itemsize, pinned=self._pinned)
            room = room.view(dtype).view(capacity, *shape[1:])
            if self.live is not None:
                room[: len(self.live)].copy_(self.live)
        self._room = room


class HostLayer(RunLayer):
    """A layer of a dynamic cache whose rows are in host memory."""

    def __init__(self, *, pinned: bool = False) -> None:
        """Start empty."""
        self._keys, self._values = HostRows(pinned=pinned), HostRows(pinned=pinned)
        self.live_keys: torch.Tensor | None = None
        self.live_values: torch.Tensor | None = None
        self.new_keys: torch.Tensor | None = None  # of the last forward
        self.new_values: torch.Tensor | None = None
        self.is_initialized = False

    @property
    def keys(self) -> torch.Tensor | None:
        """The live keys in host memory, of shape (batch, heads, tokens, width)."""
        return None if self.live_keys is None else self.live_keys.permute(HEADS_SECOND)

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self.live_keys = None if value is None else value.permute(TOKENS_FIRST)

    @property
    def values(self) -> torch.Tensor | None:
        """The live values in host memory, of shape (batch, heads, tokens, width)."""
        return None if self.live_values is None else self.live_values.permute(HEADS_SECOND)

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self.live_values = None if value is None else value.permute(TOKENS_FIRST)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values on the device, the new ones last."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = key_states, value_states
        if self.live_keys is not None and self.live_values is not None:
            old_keys = to_device(self.live_keys, key_states).permute(HEADS_SECOND)
            old_values = to_device(self.live_values, value_states).permute(HEADS_SECOND)
            keys = torch.cat([old_keys, key_states], dim=-2)
            values = torch.cat([old_values, value_states], dim=-2)
        self.new_keys = to_host(key_states.permute(TOKENS_FIRST))
        self.new_values = to_host(value_states.permute(TOKENS_FIRST))
        if not torch.compiler.is_compiling():  # eager code has no caller that settles
            self.settle()
        return keys, values

    def get_seq_length(self) -> int:
        """Return the number of live tokens."""
        return 0 if self.live_keys is None else self.live_keys.shape[0]

    def reset(self) -> None:
        """Forget all rows."""
        self.live_keys = self.live_values = self.new_keys = self.new_values = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; what a positive number means differs between versions."""
        if self.live_keys is not None or tokens_to_remove > 0:
            super().crop(tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put the sequences of the batch into another order, as beam search does."""
        self.prepare()
        self._keys.select(beam_idx.to("cpu"))
        self._values.select(beam_idx.to("cpu"))
        self.live_keys, self.live_values = self._keys.live, self._values.live

    def take(self, layer: DynamicLayer) -> None:
        """Take the state of a caller's layer; rows that are in host memory already stay there."""
        self.forget_new()
        self.is_initialized = is_initialized(layer)
        if not self.is_initialized:
            self.live_keys = self.live_values = None
            return
        self.device = layer.device
        self.keys, self.values = _some(layer.keys), _some(layer.values)

    def give(self, layer: DynamicLayer) -> None:
        """Give a caller's layer the state of this one, with keys and values in host memory."""
        keys = self.keys if self.is_initialized else None
        layer.is_initialized = keys is not None
        layer.keys = keys
        layer.values = None if keys is None else self.values
        if keys is not None:
            layer.device = self.device
            name_dtype(layer, keys.dtype)

    # Between two calls.

    def settle(self) -> None:
        """Copy the rows of the last forward to the end of the live ones."""
        if self.new_keys is not None and self.new_values is not None:
            self.prepare()
            device_of(self.device).synchronize_stream()  # their copies may still run
            self._keys.append(self.new_keys)
            self._values.append(self.new_values)
            self.live_keys, self.live_values = self._keys.live, self._values.live
        self.forget_new()

    def forget_new(self) -> None:
        """Forget the new rows of a failed forward."""
        self.new_keys = self.new_values = None

    def prepare(self) -> None:
        """Bring rows that the caller reordered or cut back into place."""
        for rows, live in ((self._keys, self.live_keys), (self._values, self.live_values)):
            if live is not None and len(live) == 0:
                live = None
            if live is None or rows.live is None or not _is_prefix(live, rows.live):
                rows.set(live)
            else:
                rows.live = live
        self.live_keys, self.live_values = self._keys.live, self._values.live


def _some(rows: torch.Tensor | None) -> torch.Tensor | None:
    return None if rows is None or rows.numel() == 0 else rows


def _is_prefix(live: torch.Tensor, of: torch.Tensor) -> bool:
    return (
        live.data_ptr() == of.data_ptr()
        and live.is_contiguous()
        and live.shape[1:] == of.shape[1:]
        and live.dtype == of.dtype
    )


def host_layers(caches: Iterable[Cache]) -> list[HostLayer]:
    """List the layers of caches that are in host memory."""
    return [layer for cache in caches for layer in cache.layers if isinstance(layer, HostLayer)]


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


def move_to_host(cache: Cache, *, pinned: bool) -> bool:
    """Move a cache to host memory, in place; return False if there is nothing to move.

    Only layers that grow with every token are moved. A layer with a sliding window does not grow.
    """
    moved = False
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer or isinstance(layer, RoomLayer):
            cache.layers[index] = _moved(layer, pinned=pinned)
            moved = True
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = _PinnedLayer if pinned else HostLayer
        moved = True
    return moved


def _moved(layer: DynamicLayer, *, pinned: bool) -> HostLayer:
    found = HostLayer(pinned=pinned)
    keys, values = layer.keys, layer.values
    if is_initialized(layer) and keys is not None and values is not None and keys.numel():
        found.lazy_initialization(keys, values)
        found._keys.set(keys.permute(TOKENS_FIRST))
        found._values.set(values.permute(TOKENS_FIRST))
        del keys, values
        layer.keys = layer.values = None  # free its device bytes before the next layer moves
        found.live_keys, found.live_values = found._keys.live, found._values.live
    return found


class _PinnedLayer(HostLayer):
    def __init__(self) -> None:
        super().__init__(pinned=True)


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
