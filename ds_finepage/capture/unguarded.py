"""Notices changes on which Dynamo has no guard, so that no graph outlives them.

Dynamo looks at the hooks of a module while it traces, and never again. It takes the functions of a
class for constants. A graph that it has made lacks a hook that comes later, and has the old code of
a method that is replaced. And into which ops a graph falls, settings of torch decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ds_finepage._compat.torch import GLOBAL_HOOKS


class Unguarded:
    """The hooks of a model's modules and the methods that were traced, as of the last look."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Look at them now, in the parts that the model has now."""
        parts = list(module.modules())
        self._hooks: list[Mapping[int, Any]] = [*GLOBAL_HOOKS]
        for part in parts:
            self._hooks += (part._forward_pre_hooks, part._forward_hooks)
        self._classes = list(dict.fromkeys(map(type, parts)))
        self._traced: set[CodeType] = set()
        self.see()

    def take(self, codes: Iterable[CodeType]) -> None:
        """Take code that Dynamo has traced; methods that have it are looked at from then on.

        Before that, these are the ``forward`` alone.
        """
        self._traced.update(codes)

    def see(self) -> None:
        """Treat what there is now as unchanged."""
        self._num_made = RemovableHandle.next_id
        self._num_hooks = list(map(len, self._hooks))
        self._keys = list(map(tuple, self._hooks))
        self._methods = [(get, c) for c in self._classes for get in self._methods_of(c)]
        self._code = self._look_at_code()

    def changed(self) -> bool:
        """Tell whether anything is different from the last look, which this one replaces.

        Every call of the model asks this, so keys are compared only if a hook was made since: one
        may have taken the place of another.
        """
        is_same = self._num_hooks == list(map(len, self._hooks))
        if is_same and self._num_made != RemovableHandle.next_id:
            self._num_made = RemovableHandle.next_id
            is_same = self._keys == list(map(tuple, self._hooks))
        if is_same and self._code == self._look_at_code():
            return False
        self.see()
        return True

    def _look_at_code(self) -> list[Any]:
        try:
            return [get(owner) for get, owner in self._methods]
        except AttributeError:  # one was deleted
            return []

    def _methods_of(self, owner: type) -> list[attrgetter[Any]]:
        names = {"forward"}
        for base in owner.__mro__:
            if base not in (torch.nn.Module, object):
                names |= {n for n, value in vars(base).items() if self._is_traced(value)}
        return [attrgetter(name) for name in sorted(names)]

    def _is_traced(self, value: Any) -> bool:
        return any(function.__code__ in self._traced for function in functions_in(value))


def functions_in(value: Any) -> Iterator[FunctionType]:
    """Yield the functions of an attribute of a class, with those that decorators have around."""
    parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
    for part in parts:
        part = getattr(part, "__func__", part)  # of a static method or one of the class
        while isinstance(part, FunctionType):
            yield part
            part = getattr(part, "__wrapped__", None)


def kernel_settings() -> tuple[object, ...]:
    """Return the settings of torch that decide into which ops a call falls.

    They are those on which Dynamo has no guard.
    """
    backends = torch.backends
    return (
        backends.cuda.flash_sdp_enabled(),
        backends.cuda.mem_efficient_sdp_enabled(),
        backends.cuda.math_sdp_enabled(),
        backends.cuda.cudnn_sdp_enabled(),
        backends.cudnn.enabled,
        backends.mha.get_fastpath_enabled(),
        backends.mkldnn.enabled,
    )
