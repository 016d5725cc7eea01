"""Runs forwards that carry a KV cache: with room behind its rows, or with its rows on the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.integrations.transformers.host_cache import (
    HandedOut,
    HostLayer,
    caches_among,
    move_to_host,
    require_fitting,
    seen_lengths,
    take_back,
    with_cache,
)
from ds_finepage.integrations.transformers.preflight import CacheUse, cache_bytes
from ds_finepage.integrations.transformers.room import (
    RoomLayer,
    RunLayer,
    all_rows,
    ample_rows,
    in_steps,
    layers_of,
)
from ds_finepage.runtime.stats import Counters

TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
"""Arguments of a call that have an entry for each new token."""

MakeRoom = Callable[[Sequence[torch.Tensor], Sequence[int]], bool]
"""Makes room for a KV cache: its present tensors, and the bytes of those that take their places.
Returns whether the old and the new room of a tensor do not fit together."""


@dataclass(frozen=True, slots=True)
class CapturedCall:
    """One call of an attached model, or of a part of it."""

    compiled: Callable[..., Any]
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def caches(self, *, growing: bool = False) -> list[Any]:
        """List the KV caches among the arguments, as :func:`caches_among` does."""
        return caches_among((*self.args, *self.kwargs.values()), growing=growing)


class KVOffload:
    """Runs calls on the device; repeats a refused call with its KV cache in host memory.

    A cache that competes with the weights starts in host memory. For any other one weights make way
    first: the arena is the rest of the budget beside the cache. Then the cache moves to host memory
    too. ``HandedOut`` brings the caches back to the device when the model is detached.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        make_room: MakeRoom = lambda rooms, after: False,
        note_live: Callable[[Iterable[torch.Tensor]], None] = lambda tensors: None,
        require_host: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._counters = counters
        self._make_room = make_room
        self._note_live = note_live
        self._require_host = require_host
        self._on_host: weakref.WeakSet[HostLayer] = weakref.WeakSet()
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self.handed_out = HandedOut()
        self._num_generations = 0  # nested ones count each
        self.use = CacheUse()
        self._of_generation: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def host_bytes(self) -> int:
        """Bytes of caches in host memory."""
        return sum(layer.nbytes for layer in self._on_host)

    @contextmanager
    def generation(self, use: CacheUse) -> Iterator[None]:
        """Give callers their own cache layers back at the end of a generation, not at each step."""
        if self._num_generations:  # another thread generates too, or this one within its generation
            is_reordered = use.is_reordered or self.use.is_reordered
            use = replace(self.use, is_reordered=is_reordered)
        self.use = use
        self._num_generations += 1
        try:
            yield
        finally:
            self._num_generations -= 1
            if not self._num_generations:
                self.use = CacheUse()
                caches = list(self._of_generation)
                self._of_generation.clear()
                self._hand_out(caches)

    def call(self, call: CapturedCall, *, may_move: bool, starts_on_host: bool = False) -> Any:
        """Run a call.

        KV caches go to host memory if they ``may_move``; before anything is refused if the call
        ``starts_on_host``.

        Raises:
            StoreError: A cache belongs to another model.
            PlanInfeasibleError: There is no room, wherever the cache is.
        """
        for cache in caches_among(call.kwargs.values()):
            if cache not in self._known:
                require_fitting(call.module, cache)
                self._known.add(cache)
        for cache in call.caches(growing=True):
            self.handed_out.take(cache)
        own = replace(call, kwargs=dict(call.kwargs))  # a moved cache may be added to them
        if starts_on_host and not layers_of(own.caches(), HostLayer):
            self._move(own)
        try:
            return self._call(own, may_move=may_move)
        finally:
            self._hand_out(own.caches(growing=True))

    def _call(self, call: CapturedCall, *, may_move: bool) -> Any:
        refusal: PlanInfeasibleError | None = None
        try:
            while True:
                for moved in layers_of(call.caches(), HostLayer):
                    moved.prepare()
                before = seen_lengths(call.caches())
                try:
                    self._give_room(call)
                    result = call.compiled(*call.args, **call.kwargs)
                    self._require_rooms(call)
                    break
                except PlanInfeasibleError as error:
                    # Behind a graph break a part of the forward may have run already.
                    if not take_back(before):
                        raise
                    refusal = _lesser(refusal, error.bare())
                # The frames of the error are gone, and the tensors that they held.
                if not (may_move and self._move(call)):
                    raise refusal
        except BaseException:
            for layer in layers_of(call.caches(), RunLayer):  # type: ignore[type-abstract]
                layer.forget_new()
            raise
        for layer in layers_of(call.caches(), RunLayer):  # type: ignore[type-abstract]
            layer.settle()
        return result

    def _require_rooms(self, call: CapturedCall) -> None:
        """Refuse the new rows of a call that have no room within the host budget."""
        layers: list[HostLayer] = layers_of(call.caches(), HostLayer)
        self._on_host.update(layers)
        grown = [(more, layer.nbytes) for layer in layers if (more := layer.larger_bytes)]
        if grown:  # one after the other; the old room is freed when the rows have moved
            more_bytes = sum(new - old for new, old in grown)
            self._require_host(more_bytes + max(old for _, old in grown))

    def _give_room(self, call: CapturedCall) -> None:
        """Give the layers of a call room for its new rows, or refuse it."""
        num_new, longest = _num_new(call), self.use.longest
        enough = all_rows if self.use.is_made_at_once else ample_rows
        for cache in call.caches(growing=True):
            wanted: dict[RunLayer, int] = {}
            for layer in layers_of([cache], RunLayer):  # type: ignore[type-abstract]
                num_rows = layer.get_seq_length() + num_new
                if num_rows >= layer.capacity:
                    wanted[layer] = enough(num_rows, longest)
            on_device = {x: n for x, n in wanted.items() if isinstance(x, RoomLayer)}
            if on_device:
                self._resize(layers_of([cache], RoomLayer), on_device)
            for layer, capacity in wanted.items():
                if isinstance(layer, HostLayer):
                    layer.give_room(in_steps(capacity))

    def _resize(self, layers: Sequence[RoomLayer], capacities: Mapping[RoomLayer, int]) -> None:
        """Move the rows of all ``layers`` of a cache into rooms of other capacities."""
        rooms = [room for layer in layers for room in layer.rooms]
        after = [n for x in layers for n in x.room_bytes(capacities.get(x, x.capacity))]
        via_host = bool(rooms) and self._make_room(rooms, after)
        del rooms  # each is freed as soon as its rows have moved
        for layer, capacity in capacities.items():
            layer.resize(capacity, via_host=via_host)

    def _move(self, call: CapturedCall) -> int:
        """Move the caches of a call to host memory; return how many moved."""
        call.kwargs.update(with_cache(call.module, call.args, call.kwargs))
        self._require_host(sum(map(cache_bytes, call.caches(growing=True))))
        num_moved = sum(move_to_host(cache) for cache in call.caches(growing=True))
        self._counters.num_caches_on_host += num_moved
        return num_moved

    def _hand_out(self, caches: Iterable[Any]) -> None:
        """Give callers their own cache layers back; within a generation only at its end."""
        for cache in caches:
            if self._num_generations:
                self._of_generation.add(cache)
            else:
                self._note_live(self.handed_out.hand_out(cache))


def _num_new(call: CapturedCall) -> int:
    """Return how many tokens a call adds to its caches; 0 where its arguments do not tell."""
    given = [call.kwargs.get(name) for name in TOKENS] + list(call.args[:1])
    found = next((value for value in given if isinstance(value, torch.Tensor)), None)
    return 0 if found is None or found.dim() < 2 else found.shape[1]


def _lesser(before: PlanInfeasibleError | None, now: PlanInfeasibleError) -> PlanInfeasibleError:
    """Return the refusal that needs less."""
    if before is None or None in (before.min_budget_bytes, now.min_budget_bytes):
        return now
    assert before.min_budget_bytes is not None and now.min_budget_bytes is not None
    return before if before.min_budget_bytes < now.min_budget_bytes else now
