"""Finds torch's public function that calls a bound op, because it takes its arguments faster.

``torch.ops.aten.mul.out`` and ``torch.mul`` end at the same overload. The first one reads its
arguments by the op's schema, in Python and C++. The second one was generated for its op, and costs
the host about one microsecond less. Which overload it takes depends on the arguments. So both are
called on the task's own arguments, under a mode that writes the call down and runs nothing. Only a
function that arrives at the same overload with the same arguments is taken.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ds_finepage._compat.torch import TorchDispatchMode, _nn, tree_leaves

BUILT_IN = (types.BuiltinFunctionType, types.MethodDescriptorType)


def direct_call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function that does what the overload ``op`` does with these arguments.

    Args:
        op: An overload of ATen that writes into given tensors.
        args: Its arguments; no tensor is read or written.
        kwargs: Its keywords, with the tensors that it writes into.

    Returns:
        torch's public function or method of the op's name, or ``op`` itself where that one takes
        another way.
    """
    public = _public(getattr(getattr(op, "overloadpacket", None), "__name__", ""))
    if public is None:
        return op  # type: ignore[no-any-return]
    if not any(isinstance(a, torch.Tensor) for a in tree_leaves(args)):
        return op  # type: ignore[no-any-return]  # ``torch.set_default_device`` would change it
    wanted = _written_down(op, args, kwargs)
    found = None if wanted is None else _written_down(public, args, kwargs)
    return public if found is not None and _is_same(found, wanted) else op


def _public(name: str) -> Callable[..., Any] | None:
    """Find a function of torch, one of its neural networks, or a method of tensors."""
    for home in (torch, _nn, torch.Tensor):
        found = getattr(home, name, None)
        if isinstance(found, BUILT_IN):  # not what others put in its place
            return found
    return None


class _Writer(TorchDispatchMode):
    """Writes calls down and runs none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.calls.append((func, args, kwargs))
        written = [i for i, a in enumerate(func._schema.arguments) if _is_written(a)]
        names = [a.name for a in func._schema.arguments]
        outs = tuple(args[i] if i < len(args) else kwargs[names[i]] for i in written)
        return outs[0] if len(outs) == 1 else outs


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _written_down(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """Return the one overload that a call arrives at, with its arguments; None for none or more."""
    try:
        with torch.no_grad(), _Writer() as writer:
            call(*args, **kwargs)
    except (RuntimeError, TypeError):  # it takes other arguments
        return None
    return writer.calls[0] if len(writer.calls) == 1 else None


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):  # a number becomes a new tensor in each call
        numbers = one.dim() == other.dim() == 0 and one.is_cpu and other.is_cpu
        return one is other or (
            numbers and one.dtype == other.dtype and bool(torch.equal(one, other))
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[k], other[k]) for k in one)
    return bool(one == other)
