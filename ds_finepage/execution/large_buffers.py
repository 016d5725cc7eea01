"""Finds the tensors of a module, beside its parameters, that are weights too.

[Note: buffers as weights]
Packed layers keep numbers and scales where their library likes: in buffers, in attributes, in
dictionaries, in an object on a parameter. Such a tensor is a weight if it is large and has its
storage for itself, as long as the forward does not change it. The module keeps the same object at
the same place; only its bytes move. Three signs show that the forward changes a tensor. It then
stays on the device from there on, as small buffers do:

- A captured graph writes it or returns a view of it: capture raises ``BufferChangedError``.
- Other code has written it during a call (``WeightTable.written_buffers``).
- Another tensor is in its place after a call (``LargeBuffers.replaced``).

A tensor that the user puts there between two calls is a weight again.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from ds_finepage.execution.watch import data_of, is_watched, set_data

MIN_BUFFER_BYTES = 64 << 10
"""A smaller tensor stays on the device: in the fixed time of one copy a link moves about this many
bytes. Rotary tables, and the statistics of a normalization, are below it."""

MAX_DEPTH = 4
"""Objects within objects that are looked into: a quantisation state, and that of its scales."""

_OF_TORCH = frozenset(vars(torch.nn.Module()))
_CLOSED = (torch.nn.Module, type, ModuleType, FunctionType, MethodType, weakref.ref)
_OURS = __name__.partition(".")[0]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module has a tensor.

    A buffer that is registered goes where the module computes.
    """

    name: str
    container: Any
    key: Any
    tensor: torch.Tensor
    is_registered: bool = False

    @property
    def is_replaced(self) -> bool:
        """True where the container has something else under the key now."""
        try:
            return self.container[self.key] is not self.tensor
        except LookupError:
            return True


class LargeBuffers:
    """The large tensors beside the parameters of a module; see the note of this file."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._module = module
        self._device = device
        self._places: list[_Place] = []
        self._refused: set[str] = set()  # names of places
        self._homes: dict[int, tuple[torch.Tensor, torch.device]] = {}  # by id; where it was found

    def find(self, masters: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors that are weights now, by qualified name, each once.

        A tensor that is the master of a parameter is no weight of its own.
        """
        places = [p for p in _places(self._module) if p.name not in self._refused]
        tensors = {id(p.tensor): p.tensor for p in places}
        others = [*self._module.parameters(), *masters]
        holders = Counter(map(_storage, [*tensors.values(), *others]))
        for place in places:
            tensor = place.tensor
            if id(tensor) in self._homes or not self._is_weight(place):
                continue
            if holders[_storage(tensor)] == 1:
                self._homes[id(tensor)] = (tensor, tensor.device)
        self._homes = {key: home for key, home in self._homes.items() if key in tensors}
        self._places = [p for p in places if id(p.tensor) in self._homes]
        found: dict[int, _Place] = {}
        for place in self._places:
            found.setdefault(id(place.tensor), place)
        return {place.name: place.tensor for place in found.values()}

    def _is_weight(self, place: _Place) -> bool:
        """Tell whether a tensor may be a weight, as far as the tensor itself shows."""
        tensor = place.tensor
        return (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and tensor.nbytes >= MIN_BUFFER_BYTES
            and not tensor.is_meta
            and not tensor.requires_grad
            and not is_watched(tensor)  # by another attached model
            and tensor.untyped_storage().nbytes() == tensor.nbytes
            and bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
            and (place.is_registered or tensor.device == self._device)
        )

    def replaced(self) -> list[str]:
        """Return the names of places that have another tensor now."""
        return [p.name for p in self._places if p.is_replaced]

    def refuse(self, names: Iterable[str]) -> list[torch.Tensor]:
        """Note that the forward changes tensors, so that they are no weights from now on.

        Returns:
            The tensors that were there.
        """
        wanted = set(names)
        tensors = {id(p.tensor): p.tensor for p in self._places if p.name in wanted}
        self._refused |= {p.name for p in self._places if id(p.tensor) in tensors}
        self._places = [p for p in self._places if id(p.tensor) not in tensors]
        return list(tensors.values())

    def restore(self) -> None:
        """Bring every tensor back to the device where it was found."""
        for tensor, home in self._homes.values():
            if tensor.device != home:
                set_data(tensor, data_of(tensor).to(home))
        self._homes, self._places = {}, []


def _storage(tensor: torch.Tensor) -> int:
    """Return a number that two tensors share if they are views of one storage."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain or tensor.layout is not torch.strided:
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def _places(module: torch.nn.Module) -> Iterator[_Place]:
    """Yield the places of all tensors that are no parameters."""
    seen: set[int] = set()
    for path, owner in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield _Place(prefix + name, owner._buffers, name, buffer, is_registered=True)
        yield from _within(path, vars(owner), seen, depth=0)
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield from _within(prefix + name, vars(parameter), seen, depth=0)


def _within(path: str, container: Any, seen: set[int], *, depth: int) -> Iterator[_Place]:
    """Yield the places of the tensors in a container and in the objects there.

    ``depth`` are the objects around it. Attributes that each module has from torch do not count.
    """
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        name = f"{path}.{key}" if path else str(key)
        if isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter):
                yield _Place(name, container, key, value)
        elif key not in _OF_TORCH and id(value) not in seen and depth < MAX_DEPTH:
            inner = _parts_of(value)
            if inner:
                seen.add(id(value))
                yield from _within(name, inner, seen, depth=depth + 1)


def _parts_of(value: Any) -> Any:
    """Return what an object holds: a dictionary or a sequence; None where it is not looked into."""
    if isinstance(value, (dict, list, tuple)):
        return value
    if isinstance(value, _CLOSED) or type(value).__module__.partition(".")[0] == _OURS:
        return None
    return getattr(value, "__dict__", None)
