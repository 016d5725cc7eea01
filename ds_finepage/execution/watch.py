"""Notices uses of ``parameter.data``, which reads or replaces the bytes of a parameter.

[Note: how a change of a weight is noticed]
A parameter of an attached model shows its host master, so writing to the parameter writes to the
master. An old copy may still lie in the arena and must not be used. Three signs show a change. The
runtime reads all three before each call:

- The version counter. Every in-place op raises it, through the parameter, a view of it, or a tensor
  of its ``state_dict``.
- The address. ``set_``, ``resize_`` and ``share_memory_`` move a tensor to other memory.
- This module. A tensor that ``parameter.data`` returns has a version counter of its own, so
  ``parameter.data.add_(1)`` leaves no other sign. Therefore the attribute ``data`` of
  ``torch.nn.Parameter`` is a property while any model is attached. It behaves as before, and notes
  the watched parameters that it was used on. While a tensor that it returned, or was set to, is
  alive, its parameter counts as changed. Where a buffer is watched, ``torch.Tensor`` has the
  property instead.

Writes through NumPy, DLPack or a raw pointer leave no sign. ``Handle.refresh`` is for those.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

_DATA: Any = torch.Tensor.data
"""The attribute as torch defines it."""

Replacement = Callable[[torch.Tensor], torch.Tensor]


def data_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return ``parameter.data``; the watch does not notice."""
    data: torch.Tensor = _DATA.__get__(parameter)
    return data


def set_data(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Set ``parameter.data``; the watch does not notice."""
    _DATA.__set__(parameter, value)


class DataWatch:
    """Records the uses of ``data`` of one parameter.

    Attributes:
        was_used: True once the attribute was read or set; :meth:`clear` resets it.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        used: list[DataWatch],
        replace: Replacement,
    ) -> None:
        """Watch a parameter until :meth:`stop`, or until the watch itself is freed.

        Args:
            parameter: The parameter; the owner of the watch keeps it alive.
            used: The watch appends itself here on its first use.
            replace: Maps a tensor that the user sets as ``data`` to the one that is stored.
        """
        self.was_used = False
        self._used = used
        self._aliases: list[weakref.ref[torch.Tensor]] = []
        self._replace = replace
        self._id = id(parameter)
        _watches[self._id] = self
        _install(torch.nn.Parameter if isinstance(parameter, torch.nn.Parameter) else torch.Tensor)

    def stop(self) -> None:
        """End the watch."""
        if _watches.get(self._id) is self:
            del _watches[self._id]
        uninstall_if_unused()

    def clear(self) -> None:
        """Forget past uses. A tensor that is still alive is a use at present."""
        self._aliases = [alias for alias in self._aliases if alias() is not None]
        self.was_used = False
        if self._aliases:
            self._note()

    def read(self, alias: torch.Tensor) -> None:
        """Record a tensor that shares the parameter's bytes."""
        self._note()
        self._aliases.append(weakref.ref(alias))

    def set(self, value: torch.Tensor) -> torch.Tensor:
        """Record that ``data`` is set; return the tensor to store."""
        self.read(value)
        return self._replace(value)

    def _note(self) -> None:
        if not self.was_used:
            self.was_used = True
            self._used.append(self)


_watches: weakref.WeakValueDictionary[int, DataWatch] = weakref.WeakValueDictionary()


def is_watched(parameter: torch.Tensor) -> bool:
    """Return True if the parameter belongs to an attached model."""
    return id(parameter) in _watches


def _get(parameter: torch.Tensor) -> torch.Tensor:
    alias = data_of(parameter)
    watch = _watches.get(id(parameter))
    if watch is not None:
        watch.read(alias)
    elif not _watches:  # the last model was freed without being detached
        uninstall_if_unused()
    return alias


def _set(parameter: torch.Tensor, value: torch.Tensor) -> None:
    watch = _watches.get(id(parameter))
    set_data(parameter, value if watch is None else watch.set(value))


_property = property(_get, _set, doc=_DATA.__doc__)


def _install(owner: type[torch.Tensor]) -> None:
    if "data" not in vars(owner):
        owner.data = _property  # type: ignore[assignment]


def uninstall_if_unused() -> None:
    """Restore the attribute of torch's classes if no parameter is watched."""
    for owner in (torch.nn.Parameter, torch.Tensor):
        if not _watches and vars(owner).get("data") is _property:
            del owner.data
