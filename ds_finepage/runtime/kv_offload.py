"""Calls with KV caches: what is asked of one before, and where it goes without room."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
from ds_finepage.runtime.stats import Stats


class CachedCalls:
    """Runs captured calls; where there is no room for a KV cache, with that in host memory.

    Weights have made way for the cache before that: the arena is what it leaves.
    """

    def __init__(self, stats: Stats, *, pinned: bool, may_move: Callable[[], bool]) -> None:
        """Start without having seen a cache.

        Args:
            stats: Counters to keep.
            pinned: Whether host memory is to be pinned.
            may_move: Tells whether a cache may be moved now.
        """
        self._stats = stats
        self.may_move = may_move
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._handed_out = HandedOut(pinned=pinned)
        self._num_generations = 0  # that are going on, one within the other
        self._of_generation: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def is_generating(self) -> bool:
        """True while a generation goes on."""
        return self._num_generations > 0

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Hand caches out at the end of a generation, and not between its steps."""
        self._num_generations += 1
        try:
            yield
        finally:
            self._num_generations -= 1
            if not self._num_generations:
                for cache in list(self._of_generation):
                    self._handed_out.hand_out(cache)
                self._of_generation.clear()

    def apart(self, values: Any) -> Any:
        """Return a call's arguments with caches of their own, which share the tensors."""
        caches = caches_among(_leaves(values), growing=True)
        for cache in caches:
            self._handed_out.take(cache)
        try:
            return copied(values, caches_among(_leaves(values)))
        finally:
            self._hand_out(caches)

    def move(self, cache: Any) -> bool:
        """Move one cache to host memory; False where there is nothing to move."""
        return self.may_move() and self._handed_out.move(cache)

    def bring_back(self) -> None:
        """Bring the caches in host memory back to the device, when the model is let go."""
        self._handed_out.bring_back()

    def call(
        self,
        compiled: Callable[..., Any],
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call.

        Args:
            compiled: The captured call.
            module: The module that it is a call of.
            args: Its arguments.
            kwargs: Its named arguments.

        Raises:
            StoreError: A cache is that of another model.
            PlanInfeasibleError: There is no room, wherever the cache is.
        """
        for cache in caches_among(kwargs.values()):
            if cache not in self._known:
                require_fitting(module, cache)
                self._known.add(cache)
        for cache in caches_among((*args, *kwargs.values()), growing=True):
            self._handed_out.take(cache)
        given = dict(kwargs)
        try:
            return self._call(compiled, module, args, given)
        finally:
            self._hand_out(caches_among((*args, *given.values()), growing=True))

    def _call(
        self,
        compiled: Callable[..., Any],
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        for layer in host_layers((*args, *kwargs.values())):
            layer.prepare()
        before = seen_lengths((*args, *kwargs.values()))
        num_moved = 0
        try:
            try:
                result = compiled(*args, **kwargs)
            except PlanInfeasibleError as error:
                refusal = error.bare()
                # Behind a graph break a part of the forward may have been run already.
                if not take_back(before) or not self.may_move():
                    raise
                kwargs.update(with_cache(module, args, kwargs))
                num_moved = self._move((*args, *kwargs.values()))
                if not num_moved:
                    raise
            if num_moved:  # not while the error is there, whose frames hold what was on the device
                result = self._in_host_memory(compiled, args, kwargs, refusal)
        except BaseException:
            for layer in host_layers((*args, *kwargs.values())):
                layer.forget_new()
            raise
        for layer in host_layers((*args, *kwargs.values())):
            layer.settle()
        return result

    def _in_host_memory(
        self,
        compiled: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        refusal: PlanInfeasibleError,
    ) -> Any:
        """Run a call whose caches were moved; where it is refused too, the lesser need counts."""
        try:
            return compiled(*args, **kwargs)
        except PlanInfeasibleError as error:
            needs = (refusal.min_budget_bytes, error.min_budget_bytes)
            if None not in needs and needs[0] < needs[1]:  # type: ignore[operator]
                raise refusal from None
            raise

    def _move(self, values: tuple[Any, ...]) -> int:
        """Move the caches among a call's arguments to host memory; return how many were moved."""
        caches = caches_among(values, growing=True)
        num_moved = sum(self._handed_out.move(cache) for cache in caches)
        self._stats.num_caches_on_host += num_moved
        return num_moved

    def _hand_out(self, caches: Iterable[Any]) -> None:
        """Let callers see their own layers, between the steps of a generation excepted."""
        for cache in caches:
            if self._num_generations:
                self._of_generation.add(cache)
            else:
                self._handed_out.hand_out(cache)


def _leaves(values: Any) -> list[Any]:
    args, kwargs = values
    return [*args, *kwargs.values()]
