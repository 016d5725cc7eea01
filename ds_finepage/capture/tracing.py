"""Makes Dynamo trace an attached model as fast as one that is not attached.

Three things slow Dynamo down. The hooks that serve the fallback keep it from the short way
through a module's call, although they do nothing inside a graph. And Python's garbage collector
walks all of torch and transformers again and again, because tracing makes many objects. And a
decode step with a growing KV cache is traced twice, because Dynamo learns from the second step that
a size varies. So while Dynamo compiles a frame of a call, the hooks are out of the modules, and the
sizes that grow are marked. The collector is off from then until the call ends, because recording
and planning a new graph make many objects too.

It also lets Dynamo trace a step of transformers' continuous batching as one graph. transformers
keeps compilers out of ``PagedAttentionCache.update``, because Inductor and CUDA graphs do not go
well with views of one block of memory. Plans do: such a block is one buffer. Without this each
layer would be a graph of its own.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from threading import get_ident
from types import CodeType, MethodType
from typing import Any

import torch
from rich.console import Console
from torch.utils.hooks import RemovableHandle

from ds_finepage._compat.torch import (
    TracingContext,
    callback_handler,
    dynamo_config,
    maybe_mark_dynamic,
    register_bytecode_hook,
    tree_leaves,
)
from ds_finepage.capture.dynamo_graph import SHARES_MEMORY
from ds_finepage.capture.unguarded import Unguarded

logger = logging.getLogger(__name__)

TEXT = "ds_finepage captures and plans the first call"
"""Shown while Dynamo is at work."""

PAGED_CACHE = "PagedAttentionCache"
"""The class of transformers."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call: by position, and by name."""

HOOK_DICTS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""Attributes of a module that hold hooks."""


class OwnHooks:
    """The hooks that an attachment has registered, in the dictionaries of their modules."""

    def __init__(self, module: torch.nn.Module, handles: Sequence[RemovableHandle]) -> None:
        """Find the modules below ``module`` that have the hooks of ``handles``."""
        self._own = {handle.id for handle in handles}
        dicts = ([getattr(part, name) for name in HOOK_DICTS] for part in module.modules())
        self._modules = [d for d in dicts if any(self._own.intersection(hooks) for hooks in d)]
        self._hidden: list[tuple[dict[Any, Any], dict[Any, Any]]] = []

    def hide(self) -> None:
        """Empty the dictionaries of each module that has nothing but own hooks.

        A module with other hooks keeps all of them: Dynamo guards on those that it traces.
        """
        if self._hidden or not dynamo_config.skip_nnmodule_hook_guards:
            return
        for dicts in self._modules:
            if all(self._own.issuperset(hooks) for hooks in dicts):
                self._hidden += [(hooks, dict(hooks)) for hooks in dicts if hooks]
        for hooks, _ in self._hidden:
            hooks.clear()

    def restore(self) -> None:
        """Put hidden hooks back."""
        for hooks, hidden in self._hidden:
            hooks.update(hidden)
        self._hidden = []


def mark_growing(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Tell Dynamo which sizes of a call with a KV cache grow, so that it traces decode steps once.

    By itself Dynamo traces the first step with fixed sizes, and the second step with varying ones.
    Dynamo is free to fix a marked size.
    """
    num_rows = 0
    for layer in chain.from_iterable(
        getattr(v, "layers", None) or () for v in (*args, *kwargs.values())
    ):
        if type(layer).__name__ == "RoomLayer":
            rooms, tokens_at = (layer.key_room, layer.value_room), 2
        elif type(layer).__name__ == "HostLayer":
            rooms, tokens_at = (layer.key_rows.live, layer.value_rows.live), 0
        else:
            continue
        maybe_mark_dynamic(layer.lengths, 0)
        maybe_mark_dynamic(layer.lengths, 1)
        num_rows = layer.lengths.shape[0]
        for rows in rooms:
            if rows is not None:
                maybe_mark_dynamic(rows, tokens_at)
    mask = kwargs.get("attention_mask")
    if num_rows and isinstance(mask, torch.Tensor) and mask.dim() == 2:
        maybe_mark_dynamic(mask, 1)


def open_paged_caches(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Prepare the paged KV caches among the arguments of a call, before it is traced."""
    for value in _paged_caches(args, kwargs):
        if "update" not in vars(value):
            update = type(value).update
            value.update = MethodType(inspect.unwrap(update), value)  # as torch may trace it
            for tensor in _tensors_of(value):
                setattr(tensor, SHARES_MEMORY, True)


def has_paged_cache(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a call is a step of continuous batching; the arguments are as above."""
    return any(_paged_caches(args, kwargs))


def _paged_caches(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    return (v for v in (*args, *kwargs.values()) if type(v).__name__ == PAGED_CACHE)


def _tensors_of(cache: Any) -> Iterator[torch.Tensor]:
    allocators = getattr(cache, "cache_allocators", {})
    for holder in (cache, *allocators.values()):
        yield from (leaf for leaf in tree_leaves(vars(holder)) if isinstance(leaf, torch.Tensor))


def _status() -> contextlib.AbstractContextManager[object]:
    """Return a status line on stderr, where that is a terminal; the log gets a line too."""
    logger.info("%s", TEXT)
    console = Console(stderr=True)
    return console.status(TEXT) if console.is_terminal else contextlib.nullcontext()


class QuickTracing:
    """Hides the hooks while Dynamo compiles a frame; stops the collector.

    Dynamo takes all numbers as constants meanwhile.
    """

    def __init__(
        self,
        hooks: OwnHooks,
        unguarded: Unguarded,
        take_code: Callable[[CodeType], None],
    ) -> None:
        """Make no trace yet.

        Args:
            hooks: The hooks to hide.
            unguarded: Takes the code that Dynamo traces, and looks again at the end of each call
                with a trace: a forward may install hooks of its own.
            take_code: Takes each code object that Dynamo makes a graph of.
        """
        self._hooks, self._unguarded = hooks, unguarded
        self._take_code = take_code
        self._thread: int | None = None
        self._given: Arguments = ((), {})
        self._has_traced = False
        self._settings = contextlib.ExitStack()  # of Dynamo and the collector, while it traces

    def wrap(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """Return a compiled call that is traced quickly when it has no graph yet."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before = self._thread, self._given
            self._thread, self._given = get_ident(), (args, kwargs)
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)
            try:
                return compiled(*args, **kwargs)
            finally:
                self._end()
                self._has_traced = False
                self._settings.close()
                with contextlib.suppress(ValueError):  # torch._dynamo.reset() removed all callbacks
                    callback_handler.remove_start_callback(self._begin)
                    callback_handler.remove_end_callback(self._end)
                self._thread, self._given = before

        return call

    def wrap_backend(self, backend: Callable[..., Any]) -> Callable[..., Any]:
        """Return a backend that ends the quick tracing: its graph may run right away.

        Dynamo keeps the backend for long, so the backend does not keep this object and the hooks.
        """
        reference = weakref.ref(self)

        def ending(*args: Any, **kwargs: Any) -> Any:
            tracing = reference()
            assert tracing is not None, "the call that is traced keeps it alive"
            tracing._end()
            tracing._unguarded.take(TracingContext.get_traced_code() or ())
            return backend(*args, **kwargs)

        return ending

    def _begin(self, _: Any) -> None:
        if get_ident() != self._thread:
            return
        self._prepare_compiler()
        self._hooks.hide()
        mark_growing(*self._given)
        open_paged_caches(*self._given)

    def _end(self, _: Any = None) -> None:
        self._hooks.restore()

    def _prepare_compiler(self) -> None:
        if self._has_traced:
            return
        self._has_traced = True
        if gc.isenabled():
            gc.disable()
            self._settings.callback(gc.enable)
        # Dynamo leaves cycles behind that hold the call's tensors. They are young, because nothing
        # was collected since: no need to walk all of torch and transformers.
        self._settings.callback(gc.collect, 1)
        self._settings.callback(self._unguarded.see)
        # A number that differs between two models, such as the scale of attention, would become an
        # input that the ops read, and no plan can know it.
        settings = {"run_gc_after_compile": False, "specialize_float": True}
        self._settings.enter_context(dynamo_config.patch(settings))
        self._settings.callback(register_bytecode_hook(self._take).remove)
        self._settings.enter_context(_status())

    def _take(self, code: CodeType, new_code: CodeType) -> None:
        if get_ident() == self._thread:
            self._take_code(code)
