"""Notices changes on which Dynamo has no guard, so that no graph outlives them.

Dynamo looks at the hooks of a module while it traces, and never again. It takes the functions of a
class for constants. A graph that it has made lacks a hook that comes later, and has the old code of
a method that is replaced. And into which ops a graph falls, settings of torch decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ds_finepage._compat.torch import GLOBAL_HOOKS, _get_mkldnn_enabled

_CODE = (FunctionType, staticmethod, classmethod, property)
_Functions = tuple[Callable[[Mapping[str, Any]], Any], Mapping[str, Any]]


def has_global_hooks() -> bool:
    """Tell whether a hook is called around every module of the process."""
    return any(GLOBAL_HOOKS)


class Unguarded:
    """The hooks of a model's modules and the functions of their classes, as of the last look."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Look at them now.

        Args:
            module: The model. Its parts are those of now.
        """
        parts = list(module.modules())
        self._hooks = [hooks for part in parts for hooks in _hooks_of(part)] + [*GLOBAL_HOOKS]
        owners = dict.fromkeys(base for part in parts for base in type(part).__mro__)
        self._attributes = [vars(owner) for owner in owners if owner is not torch.nn.Module]
        self.see()

    def see(self) -> None:
        """Treat what there is now as unchanged."""
        self._num_made = RemovableHandle.next_id
        self._num_hooks = list(map(len, self._hooks))
        self._keys = list(map(tuple, self._hooks))
        self._functions = list(_functions_in(self._attributes))
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

    def _look_at_code(self) -> tuple[Any, ...]:
        try:
            found = [get(attributes) for get, attributes in self._functions]
        except KeyError:  # one was deleted
            found = []
        return found, list(map(len, self._attributes))


def _hooks_of(part: torch.nn.Module) -> tuple[Mapping[int, Any], ...]:
    return part._forward_pre_hooks, part._forward_hooks


def _functions_in(attributes: Sequence[Mapping[str, Any]]) -> Iterator[_Functions]:
    """Yield how to get the functions among the attributes of each class, and these attributes."""
    for each in attributes:
        if names := [name for name, value in each.items() if isinstance(value, _CODE)]:
            yield itemgetter(*names), each


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
        _get_mkldnn_enabled(),
    )
