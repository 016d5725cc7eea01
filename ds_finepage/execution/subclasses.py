"""Takes parameters apart that are tensor subclasses, so that each inner tensor is a weight.

[Note: parameters that are tensor subclasses]
Libraries for quantisation store a packed weight as a subclass of ``torch.Tensor`` around plain
tensors: numbers, scales, zero points. torch's own protocol names them (``__tensor_flatten__``) and
builds the subclass from them (``__tensor_unflatten__``). A subclass has no bytes to page, but its
inner tensors have. So while a model is attached, its modules have the inner tensors as parameters.
A property has the name of the subclass and builds it at each use, so Dynamo sees plain ops on plain
tensors. ``state_dict``, ``load_state_dict``, copies and pickles show the subclass, as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ds_finepage.errors import StoreError
from ds_finepage.execution.watch import data_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Parts:
    """One parameter that is taken apart.

    Attributes:
        parameter: The subclass. Its attributes are the leaves, so both have the same bytes.
        leaves: Name -> inner tensor, as a parameter.
    """

    def __init__(self, name: str, parameter: Any) -> None:
        self.parameter = parameter
        self._name = name
        places = list(_places(name, parameter))
        for at, owner, attribute in places:
            kind = type(getattr(owner, attribute))
            if kind not in _PLAIN:
                raise StoreError(
                    f"{type(parameter).__name__} has a {kind.__name__} in {at}, which "
                    "torch's protocol for tensor subclasses cannot take apart"
                )
        self.leaves: dict[str, torch.nn.Parameter] = {}
        for at, owner, attribute in places:
            leaf = getattr(owner, attribute)
            if not isinstance(leaf, torch.nn.Parameter):
                leaf = torch.nn.Parameter(leaf, requires_grad=False)
            self.leaves[at] = leaf
            setattr(owner, attribute, leaf)

    def build(self, tensors: dict[str, Any]) -> Any:
        """Build the subclass from tensors that have the names of the leaves."""
        return _build(self._name, self.parameter, tensors)

    def leaves_of(self, value: Any) -> dict[str, Any] | None:
        """Return the inner tensors of another value; None if it has another form."""
        if type(value) is not type(self.parameter):
            return None
        found = {at: getattr(owner, name) for at, owner, name in _places(self._name, value)}
        return found if list(found) == list(self.leaves) else None

    def whole(self, tensors: dict[str, Any]) -> Any:
        """Return the parameter, with inner tensors that are plain again."""
        for at, owner, attribute in _places(self._name, self.parameter):
            setattr(owner, attribute, data_of(tensors[at]))
        return self.parameter


def _places(path: str, tensor: Any) -> Iterator[tuple[str, Any, str]]:
    """Yield the place of each inner tensor: the name of the leaf, its owner, the attribute."""
    for attribute in tensor.__tensor_flatten__()[0]:
        part, at = getattr(tensor, attribute), f"{path}_{attribute}"
        if _is_wrapper(part):
            yield from _places(at, part)
        else:
            yield at, tensor, attribute


def _build(path: str, like: Any, tensors: dict[str, Any]) -> Any:
    """Build a subclass like another one, from tensors by the names of its leaves."""
    attributes, context = like.__tensor_flatten__()
    parts = {}
    for attribute in attributes:
        part, at = getattr(like, attribute), f"{path}_{attribute}"
        parts[attribute] = _build(at, part, tensors) if _is_wrapper(part) else tensors[at]
    return type(like).__tensor_unflatten__(parts, context, like.size(), like.stride())


def _is_wrapper(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "__tensor_flatten__")


def _has_inner_tensors(name: str, parameter: torch.Tensor | None) -> bool:
    """Return True if a parameter has to be taken apart.

    Raises:
        StoreError: It has to be, and torch's protocol cannot.
    """
    if parameter is None or _is_wrapper(parameter):
        return parameter is not None
    if type(parameter).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    raise StoreError(
        f"parameter {name} is a {type(parameter).__name__}, a tensor subclass without "
        "__tensor_flatten__, so its bytes cannot be paged. Quantise with torchao 0.18 or newer, "
        "whose tensors have it"
    )


class _Owner:
    """Base of the classes that modules have while parameters of theirs are taken apart."""

    _finepage_class: type[torch.nn.Module]  # the class before
    _finepage_parts: dict[str, _Parts]  # name of the parameter -> its parts
    _parameters: dict[str, Any]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._finepage_parts:
            _make_whole(self)
            setattr(self, name, value)
        else:
            super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle the module as it was before."""
        state = dict(vars(self))
        parameters = state["_parameters"] = dict(self._parameters)
        for name, parts in self._finepage_parts.items():
            plain = {at: data_of(parameters.pop(at)) for at in parts.leaves}
            parameters[name] = torch.nn.Parameter(parts.build(plain), requires_grad=False)
        return object.__new__, (self._finepage_class,), state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        for name, parts in self._finepage_parts.items():
            leaves = {at: destination.pop(prefix + at) for at in parts.leaves}
            destination[prefix + name] = parts.build(leaves)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name, parts in self._finepage_parts.items():
            leaves = parts.leaves_of(state_dict.get(prefix + name))
            if leaves is not None:
                del state_dict[prefix + name]
                state_dict |= {prefix + at: leaf for at, leaf in leaves.items()}
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]


class TakenApart:
    """The parameters of a module that are taken apart; see the note of this file."""

    def __init__(self, module: torch.nn.Module) -> None:
        """Take apart all that there are.

        Raises:
            StoreError: torch's protocol cannot take a parameter apart. The module is as before.
        """
        self._module = module
        self._owners: list[torch.nn.Module] = []
        self.take()

    def take(self) -> None:
        """Take apart the parameters that came since. Tied ones stay tied.

        Raises:
            StoreError: torch's protocol cannot take a parameter apart. None is taken apart then.
        """
        parts: dict[int, _Parts] = {}  # by id of the parameter
        found: list[tuple[torch.nn.Module, dict[str, _Parts]]] = []
        for owner in self._module.modules():
            mine = {n: p for n, p in owner._parameters.items() if _has_inner_tensors(n, p)}
            for name, parameter in mine.items():
                if id(parameter) not in parts:
                    parts[id(parameter)] = _Parts(name, parameter)
            if mine:
                found.append((owner, {name: parts[id(p)] for name, p in mine.items()}))
        for owner, its_parts in found:
            _divide(owner, its_parts)
            self._owners.append(owner)

    def restore(self) -> None:
        """Put the parameters back, with their present values."""
        for owner in self._owners:
            if isinstance(owner, _Owner):
                _make_whole(owner)
        self._owners = []


def _divide(owner: torch.nn.Module, parts: dict[str, _Parts]) -> None:
    """Give a module the inner tensors in the place of its parameters."""
    base: type[torch.nn.Module] = type(owner)
    if isinstance(owner, _Owner):
        base, parts = owner._finepage_class, {**owner._finepage_parts, **parts}
    for name, taken in parts.items():
        owner._parameters.pop(name, None)
        owner._parameters.update(taken.leaves)
    namespace: dict[str, Any] = {name: _property(taken) for name, taken in parts.items()}
    namespace |= {"_finepage_class": base, "_finepage_parts": parts, "__doc__": base.__doc__}
    namespace |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
    owner.__class__ = type(base.__name__, (_Owner, base), namespace)


def _property(parts: _Parts) -> property:
    names = tuple(parts.leaves)

    # One node of Dynamo's graph: Dynamo cannot trace how a library builds its subclass.
    @torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
    def build(*tensors: torch.Tensor) -> Any:
        return parts.build(dict(zip(names, tensors, strict=True)))

    return property(lambda module: build(*[module._parameters[name] for name in names]))


def _make_whole(owner: Any) -> None:
    """Undo :func:`_divide`; tied parameters are one object again."""
    parts: dict[str, _Parts] = owner._finepage_parts
    present = owner._parameters
    for name, taken in parts.items():
        whole = taken.whole(present)
        for at in taken.leaves:
            del present[at]
        present[name] = whole
    owner.__class__ = owner._finepage_class
