"""Rows of a KV cache with room behind them, on the device.

A layer of transformers' default cache concatenates: its old and its new rows are on the device at
the same time, and all old layers stay until the forward has returned. A :class:`RoomLayer` takes
the place of such a layer while the model runs. New rows are written behind the old ones, in place.
So the cache is on the device once, and no step copies it. :class:`.host_cache.HandedOut` gives
callers their own layers back; their keys and values are views of the rows so far.

[Note: one row more]
A room has at least one row more than there are live ones. The live rows are then never the whole
room. If they were, they would be contiguous, and torch would take them for another kind of tensor:
Dynamo would compile the model once more for that step.

[Note: who may write]
Rows are written into a room only behind all rows that a caller has seen. A caller that cuts its
cache, or that puts other tensors into it, gets a new room, and the rows are copied into that. So no
tensor that a caller keeps ever changes.

[Note: how rooms grow]
A full room is left for a larger one, and its rows are copied. A generation whose whole cache is
small gets room for all of it at once. Others get a room of the next power of two, or for all where
that is less; it is also the length that passes are planned for. So a row is copied about once on
average. Where that has no room in the budget, the cache moves to host memory.
The whole room counts in the budget, as the state of the pass. While one tensor moves, its old and
new rooms exist together, and the other tensors once. Where the budget has no room for that beside
the arena, the rows of one tensor wait in host memory while its old room is freed and its new one is
made. The arena is freed only where the new rooms have no place beside it.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, TypeVar

import torch
from transformers.cache_utils import Cache, DynamicLayer

from ds_finepage._compat.transformers import is_initialized
from ds_finepage.execution.host_ops import host_bytes
from ds_finepage.planning.budget import SELECTED_PARTS

MIN_ROWS = 16
ROOM_STEPS = 16
"""Rooms of a cache in host memory differ by a part in so many of the next power of two."""


def ample_rows(num_rows: int, longest: int | None) -> int:
    """Return the rows of a room: a power of two, or no more than the cache needs at its longest.

    Args:
        num_rows: Rows that must have room.
        longest: Rows that the cache has at its longest; None if that is not known.
    """
    found = max(MIN_ROWS, 1 << num_rows.bit_length())
    return found if longest is None or longest < num_rows else min(found, longest + 1)


def all_rows(num_rows: int, longest: int | None) -> int:
    """Return the rows of a room for all rows of a cache, if they are known; see above."""
    known = 0 if longest is None else longest + 1
    return max(known, ample_rows(num_rows, longest))


def in_steps(num_rows: int) -> int:
    """Return a few more rows, so that generations of about the same length share their plans.

    Drafts that are checked at the end have room behind them too.
    """
    step = max(MIN_ROWS, (1 << num_rows.bit_length()) // ROOM_STEPS)
    return (num_rows + MIN_ROWS) // step * step + step


@lru_cache(maxsize=64)
def lengths_of(num_rows: int, capacity: int) -> torch.Tensor:
    """Return a tensor without elements whose sizes are rows and capacity.

    Dynamo takes sizes of tensors for variable more readily than integers, and one tensor for all
    layers makes one symbol of all their lengths.
    """
    with torch.inference_mode(False):
        return torch.empty(num_rows, capacity, 0)


def room_like(rows: torch.Tensor, capacity: int | torch.SymInt) -> torch.Tensor:
    """Make a room for rows of shape (batch, heads, tokens, width)."""
    return rows.new_empty((rows.shape[0], rows.shape[1], capacity, rows.shape[3]))


class RunLayer(DynamicLayer):
    """A layer of a dynamic cache while the model runs.

    Attributes:
        outside: The caller's layer that it takes the place of; None if the run has made it.
        lengths: Its sizes are the live rows and the capacity; see :func:`lengths_of`.
    """

    outside: DynamicLayer | None = None
    lengths: torch.Tensor

    @property
    def capacity(self) -> int:
        """The rows that have room on the device."""
        return self.lengths.shape[1]

    @abstractmethod
    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put new rows behind the live ones; return all of them, on the device."""

    def settle(self) -> None:
        """Count the rows of the last forward among the live ones."""

    def forget_new(self) -> None:
        """Forget the new rows of a failed forward."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put new rows behind the live ones; return all of them, on the device."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        found = self._append(key_states, value_states)
        if not torch.compiler.is_compiling():  # eager code has no caller that settles
            self.settle()
        return found

    def reset(self) -> None:
        """Forget all rows."""
        self.keys = self.values = None
        self.is_initialized = False
        self.forget_new()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens; what a positive number means differs between versions."""
        if self.keys is None and tokens_to_remove <= 0:
            return
        plain = DynamicLayer()
        plain.is_initialized = self.is_initialized
        plain.keys, plain.values = self.keys, self.values
        plain.crop(tokens_to_remove)
        self.keys, self.values = plain.keys, plain.values

    def take(self, layer: DynamicLayer) -> None:
        """Take the state of a caller's layer."""
        self.forget_new()
        self.is_initialized = is_initialized(layer)
        if self.is_initialized:
            self.device = layer.device
        self.keys, self.values = layer.keys, layer.values

    def give(self, layer: Any) -> None:
        """Give a caller's layer the state of this one."""
        keys = layer.keys = self.keys
        layer.values = self.values
        layer.is_initialized = keys is not None
        if keys is not None:
            layer.device = self.device
            layer.dtype = keys.dtype  # which a layer has before transformers 5.24

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take the device from the first rows."""
        self.device = key_states.device
        self.is_initialized = True

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some sequences of the batch."""
        if self.keys is not None:
            chosen: Any = torch.arange(len(self.keys))[indices.to("cpu")]
            self.reorder_cache(chosen)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence of the batch."""
        if self.keys is not None:
            chosen: Any = torch.arange(len(self.keys)).repeat_interleave(repeats)
            self.reorder_cache(chosen)


class RoomLayer(RunLayer):
    """A layer of a dynamic cache with room behind its rows.

    Attributes:
        key_room: Of shape (batch, heads, capacity, width); None while there are no rows.
        value_room: The same for values.
        num_new: Rows that the last forward wrote behind the live ones.
    """

    def __init__(self) -> None:
        self.key_room: torch.Tensor | None = None
        self.value_room: torch.Tensor | None = None
        self.lengths = lengths_of(0, 0)
        self.num_new = 0
        self.is_initialized = False
        self._seen: tuple[Callable[[], Any], Callable[[], Any], int] | None = None

    @property
    def keys(self) -> torch.Tensor | None:
        """The live keys, of shape (batch, heads, tokens, width)."""
        return None if self.key_room is None else self.key_room.narrow(2, 0, self._num_rows)

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self.key_room = self._put(self.key_room, value)

    @property
    def values(self) -> torch.Tensor | None:
        """The live values, of shape (batch, heads, tokens, width)."""
        return None if self.value_room is None else self.value_room.narrow(2, 0, self._num_rows)

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self.value_room = self._put(self.value_room, value)

    @property
    def _num_rows(self) -> int:
        return self.lengths.shape[0] + self.num_new

    def _put(self, room: torch.Tensor | None, rows: torch.Tensor | None) -> torch.Tensor | None:
        """Take rows that are a prefix of a room, or that come without room behind them."""
        self.num_new = 0
        if rows is None or rows.numel() == 0:
            self.lengths = lengths_of(0, self.lengths.shape[1])
            return None
        if room is None or not _is_prefix(rows, room):
            room = rows
        self.lengths = lengths_of(rows.shape[2], room.shape[2])
        return room

    def _append(
        self, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        num_live, capacity = self.lengths.shape[0], self.lengths.shape[1]
        num_rows = num_live + key_states.shape[2]
        if self.key_room is None or self.value_room is None:
            capacity = capacity if num_rows < capacity else num_rows + 1
            self.key_room = room_like(key_states, capacity)
            self.value_room = room_like(value_states, capacity)
        elif not self.key_room.shape[2] == self.value_room.shape[2] == capacity > num_rows:
            # More rows came than the call told. The comparisons give Dynamo one symbol for all
            # capacities.
            self.key_room = _moved(self.key_room, num_live, num_rows + 1)
            self.value_room = _moved(self.value_room, num_live, num_rows + 1)
        self.key_room.narrow(2, num_live, key_states.shape[2]).copy_(key_states)
        self.value_room.narrow(2, num_live, key_states.shape[2]).copy_(value_states)
        self.num_new = key_states.shape[2]
        return self.key_room.narrow(2, 0, num_rows), self.value_room.narrow(2, 0, num_rows)

    def get_seq_length(self) -> int:
        """Return the number of live tokens."""
        return self._num_rows if self.is_initialized else 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put the sequences of the batch into another order, as beam search does."""
        if self.key_room is None or self.value_room is None:
            return
        sequences = beam_idx.to(self.key_room.device)
        self.key_room = _selected(self.key_room, self._num_rows, sequences)
        self.value_room = _selected(self.value_room, self._num_rows, sequences)

    # Between two calls.

    def settle(self) -> None:
        """Count the rows of the last forward among the live ones."""
        if self.num_new:
            assert self.key_room is not None
            self.lengths = lengths_of(self._num_rows, self.key_room.shape[2])
            self.num_new = 0

    def forget_new(self) -> None:
        """Forget the new rows of a failed forward."""
        if self.num_new and not self.lengths.shape[0]:
            self.reset()
        self.num_new = 0

    @property
    def rooms(self) -> list[torch.Tensor]:
        """The rooms of keys and of values, if there are any."""
        return [room for room in (self.key_room, self.value_room) if room is not None]

    def room_bytes(self, capacity: int) -> list[int]:
        """Return the bytes of rooms for so many rows."""
        return [room.nbytes // room.shape[2] * capacity for room in self.rooms]

    def resize(self, capacity: int, *, via_host: bool = False) -> None:
        """Move to rooms of another capacity, keys first; see [Note: how rooms grow].

        Args:
            capacity: The rows of the new rooms, at least the live ones.
            via_host: Rows wait in host memory, so that each old room is freed before its new one
                is made; else both exist together.
        """
        num_rows = self.lengths.shape[0]
        with torch.inference_mode(False), torch.no_grad():  # so that every mode can write it
            for name in ("key_room", "value_room"):
                room = getattr(self, name)
                if room is None:
                    continue
                live, like = room.narrow(2, 0, num_rows), room.new_empty(0)
                if via_host:
                    live, room = kept_on_host(live), None
                    setattr(self, name, None)
                found = like.new_empty((*live.shape[:2], capacity, live.shape[3]))
                found.narrow(2, 0, num_rows).copy_(live)
                setattr(self, name, found)
        self.lengths = lengths_of(num_rows, capacity)

    def take(self, layer: DynamicLayer) -> None:
        """Take the state of a caller's layer, which keeps no tensor; see [Note: who may write]."""
        super().take(layer)
        keys, values = layer.keys, layer.values
        layer.keys = layer.values = None  # else old rows stay when they move to larger rooms
        if not self.is_initialized:
            return
        if self._seen is None or self._seen[0]() is not keys or self._seen[1]() is not values:
            return
        assert keys is not None and values is not None
        capacity = self._seen[2]
        self.key_room, self.value_room = _room_of(keys, capacity), _room_of(values, capacity)
        self.lengths = lengths_of(keys.shape[2], capacity)

    def give(self, layer: DynamicLayer) -> None:
        """Give a caller's layer the state of this one, which keeps no tensor."""
        super().give(layer)
        keys, values = layer.keys, layer.values
        self._seen = None
        if keys is not None and values is not None:
            self._seen = weakref.ref(keys), weakref.ref(values), self.capacity
        self.keys = self.values = None


def _moved(room: torch.Tensor, num_rows: int, capacity: int) -> torch.Tensor:
    found = room_like(room, capacity)
    found.narrow(2, 0, num_rows).copy_(room.narrow(2, 0, num_rows))
    return found


def _is_prefix(rows: torch.Tensor, room: torch.Tensor) -> bool:
    if rows.data_ptr() != room.data_ptr() or rows.stride() != room.stride():
        return False
    return room.narrow(2, 0, min(rows.shape[2], room.shape[2])).shape == rows.shape


def _selected(room: torch.Tensor, num_rows: int, sequences: torch.Tensor) -> torch.Tensor:
    """Return a room with these sequences of the batch; the same room for as many sequences."""
    if len(sequences) == len(room):
        step = -(-num_rows // SELECTED_PARTS)
        # PyTorch itself makes inference tensors, and only inference mode can write those.
        with torch.inference_mode(room.is_inference()), torch.no_grad():
            for live in room.narrow(2, 0, num_rows).split(max(1, step), dim=2):
                live.copy_(live.index_select(0, sequences))
        return room
    with torch.inference_mode(False), torch.no_grad():  # so that every mode can write it
        found = room.new_empty((len(sequences), *room.shape[1:]))
        chosen = found.narrow(2, 0, num_rows)
        torch.index_select(room.narrow(2, 0, num_rows), 0, sequences, out=chosen)
    return found


def kept_on_host(rows: torch.Tensor) -> torch.Tensor:
    """Copy rows to host memory."""
    found = host_bytes(rows.numel() * rows.itemsize, pinned=False).view(rows.dtype)
    return found.view(rows.shape).copy_(rows)


def _room_of(rows: torch.Tensor, capacity: int) -> torch.Tensor:
    shape = (*rows.shape[:2], capacity, rows.shape[3])
    return rows.as_strided(shape, rows.stride(), rows.storage_offset())


def can_have_room(layer: Any) -> bool:
    """Tell whether new rows of a caller's layer can be written behind its old ones."""
    if type(layer) is not DynamicLayer:
        return False
    if not is_initialized(layer):
        return True
    keys, values = layer.keys, layer.values
    if keys is None or values is None or keys.numel() == 0:
        return False
    alike = keys.dim() == values.dim() == 4 and keys.shape[2] == values.shape[2]
    return bool(alike and keys.device == layer.device and keys.dtype == values.dtype)


L = TypeVar("L", bound=RunLayer)


def layers_of(caches: Iterable[Cache], kind: type[L]) -> list[L]:
    """List the layers of caches that are of a kind."""
    return [layer for cache in caches for layer in cache.layers if isinstance(layer, kind)]
