"""Runs forwards that carry a KV cache; moves the cache to host memory when it does not fit."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.integrations.transformers.handed_out import HandedOut, copied
from ds_finepage.integrations.transformers.host_cache import (
    caches_among,
    host_layers,
    require_fitting,
    seen_lengths,
    take_back,
    with_cache,
)
from ds_finepage.runtime.captured_call import CapturedCall
from ds_finepage.runtime.stats import Counters


class KVOffload:
    """Runs calls on the device; repeats a refused call with its KV cache in host memory.

    Weights make way first: the arena is the rest of the budget beside the cache.
    """

    def __init__(self, counters: Counters, *, pinned: bool) -> None:
        """Start without a cache.

        Args:
            counters: Counts the caches that move.
            pinned: Whether host memory is to be pinned.
        """
        self._counters = counters
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handed_out = HandedOut(pinned=pinned)
        self._num_generations = 0  # nested ones count each
        self._of_generation: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def is_generating(self) -> bool:
        """True during a generation."""
        return self._num_generations > 0

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Give callers their own cache layers back at the end of a generation, not at each step."""
        self._num_generations += 1
        try:
            yield
        finally:
            self._num_generations -= 1
            if not self._num_generations:
                for cache in list(self._of_generation):
                    self._handed_out.hand_out(cache)
                self._of_generation.clear()

    def with_own_caches(self, args: Any, kwargs: Any) -> Any:
        """Copy the caches among the arguments of a call; the copies share the tensors.

        Args:
            args: The positional arguments.
            kwargs: The named arguments.
        """
        values = (*args, *kwargs.values())
        caches = caches_among(values, growing=True)
        for cache in caches:
            self._handed_out.take(cache)
        try:
            return copied((args, kwargs), caches_among(values))
        finally:
            self._hand_out(caches)

    def move(self, cache: Any) -> bool:
        """Move one cache to host memory; False where it has no layer that can move."""
        return self._handed_out.move(cache)

    def bring_back(self) -> None:
        """Bring the caches in host memory back to the device, when the model is detached."""
        self._handed_out.bring_back()

    def call(self, call: CapturedCall, *, may_move: bool) -> Any:
        """Run a call.

        Args:
            call: The call.
            may_move: The policy allows KV caches in host memory.

        Raises:
            StoreError: A cache belongs to another model.
            PlanInfeasibleError: There is no room, wherever the cache is.
        """
        for cache in caches_among(call.kwargs.values()):
            if cache not in self._known:
                require_fitting(call.module, cache)
                self._known.add(cache)
        for cache in call.caches(growing=True):
            self._handed_out.take(cache)
        own = replace(call, kwargs=dict(call.kwargs))  # a moved cache may be added to them
        try:
            return self._call(own, may_move=may_move)
        finally:
            self._hand_out(own.caches(growing=True))

    def _call(self, call: CapturedCall, *, may_move: bool) -> Any:
        caches = call.caches()
        for layer in host_layers(caches):
            layer.prepare()
        before = seen_lengths(caches)
        refusal: PlanInfeasibleError | None = None
        try:
            try:
                result = call.run()
            except PlanInfeasibleError as error:
                # Behind a graph break a part of the forward may have run already.
                if not take_back(before) or not may_move:
                    raise
                call.kwargs.update(with_cache(call.module, call.args, call.kwargs))
                caches = call.caches()
                if not self._move(call):
                    raise
                refusal = error.bare()
            if refusal is not None:  # the frames of the error are gone, and the tensors they held
                result = self._repeat(call, refusal)
        except BaseException:
            for layer in host_layers(caches):
                layer.forget_new()
            raise
        for layer in host_layers(caches):
            layer.settle()
        return result

    def _repeat(self, call: CapturedCall, refusal: PlanInfeasibleError) -> Any:
        """Repeat a refused call after its caches moved; report the lesser of two needs."""
        try:
            return call.run()
        except PlanInfeasibleError as error:
            needs = (refusal.min_budget_bytes, error.min_budget_bytes)
            if None not in needs and needs[0] < needs[1]:  # type: ignore[operator]
                raise refusal from None
            raise

    def _move(self, call: CapturedCall) -> int:
        """Move the caches of a call to host memory; return how many moved."""
        num_moved = sum(self._handed_out.move(cache) for cache in call.caches(growing=True))
        self._counters.num_caches_on_host += num_moved
        return num_moved

    def _hand_out(self, caches: Iterable[Any]) -> None:
        """Give callers their own cache layers back; within a generation only at its end."""
        for cache in caches:
            if self._num_generations:
                self._of_generation.add(cache)
            else:
                self._handed_out.hand_out(cache)
