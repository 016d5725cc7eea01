"""The strides that ops really give their results.

A fake tensor's strides come from torch's own description of an op, and for some ops (normalizations
of channels-last images) the kernel lays its result out in another way. The next op may then choose
another algorithm, whose last bits are others. So an op that is met for the first time is asked what
it really does; see :class:`StridesOf`. Views are asked on torch's meta device, where they are the
same as everywhere and there are no bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ds_finepage._compat.torch import (
    FakeTensor,
    _disable_current_modes,
    has_free_unbacked_symbols,
    tree_leaves,
    tree_map_only,
)
from ds_finepage.capture.lengths import Evaluator, size_of, sizes_of
from ds_finepage.errors import CaptureError
from ds_finepage.graph.layout import Layout

_PLAIN_TYPES = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


StridesOf = Callable[[Any, Any, Any, Sequence[Layout]], Sequence[tuple[int, ...]] | None]
"""Runs an op on scratch tensors and returns the strides of each result that is a tensor; None where
they are not known. Takes the overload, its arguments and named arguments with a :class:`Layout` for
each tensor, and what torch says of the results."""


class LayoutFixer:
    """Gives the results of fake ops the strides that the real ops give them."""

    def __init__(self, strides_of: StridesOf, values: Mapping[str, int]) -> None:
        """Ask ``strides_of``, with these values for the symbols of sizes."""
        self._strides_of = strides_of
        self._number = Evaluator(values)
        self._right: set[Any] = set()  # calls of ops whose results were right

    def __call__(self, op: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Return the result of a fake op, with the right strides.

        Raises:
            CaptureError: The strides cannot be said in terms of the symbols.
        """
        if op._schema.is_mutable:
            return result
        try:
            # Layers repeat, so most calls are like an earlier one.
            call = (op, _described(args), _described(kwargs), _described(result))
        except _UnknownLayoutError:
            return self._fixed(op, args, kwargs, result)
        if call in self._right:
            return result
        fixed = self._fixed(op, args, kwargs, result)
        if fixed is result:
            self._right.add(call)
        return fixed

    def _fixed(self, op: Any, args: Any, kwargs: Any, result: Any) -> Any:
        if not _is_known((args, kwargs, result)):
            return result
        made = _tensors(result)
        if not made or not all(isinstance(t, FakeTensor) for t in made):
            return result
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        is_view = any(t.untyped_storage()._cdata in given for t in made)
        known_args, known_kwargs = tree_map_only(
            (torch.Tensor, torch.SymInt), self._describe, (args, kwargs)
        )
        described = [self._layout(t) for t in made]
        found: Sequence[tuple[int, ...]] | None
        if is_view:
            found = _strides_of_view(op, known_args, known_kwargs)
        else:
            found = self._strides_of(op, known_args, known_kwargs, described)
        if found is None or all(d.stride == s for d, s in zip(described, found, strict=True)):
            return result
        strides = {id(t): s for t, s in zip(made, found, strict=True)}
        source = args[0] if is_view else None
        return tree_map_only(
            torch.Tensor, lambda t: self._with_strides(t, strides[id(t)], source), result
        )

    def _with_strides(
        self, tensor: torch.Tensor, wanted: tuple[int, ...], source: torch.Tensor | None
    ) -> torch.Tensor:
        """Return a fake tensor like another, with other strides: a view of ``source``, or new."""
        if self._layout(tensor).stride == wanted:
            return tensor
        stride: Sequence[Any] = wanted
        if any(isinstance(n, torch.SymInt) for n in (*tensor.shape, *tensor.stride())):
            if source is None:
                stride = _dense(tensor.shape, wanted)
            else:
                stride = self._reshaped(source, tensor.shape)
            if tuple(map(self._int, stride)) != wanted:
                raise CaptureError(f"strides {wanted} of a result do not follow from its sizes")
        if source is not None:
            return source.as_strided(tensor.shape, stride, tensor.storage_offset())
        return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)

    def _reshaped(self, source: torch.Tensor, shape: Sequence[Any]) -> list[Any]:
        """Return the strides that ``view`` gives, as torch computes them, for symbols too.

        Dimensions of the source that follow on one another are taken as one, and the last of the
        new dimensions that have as many elements lie in it; those of one element beside them.
        """
        sizes, strides = list(source.shape), list(source.stride())
        found: list[Any] = [1] * len(shape)
        at = len(shape) - 1
        base, elements = strides[-1] if strides else 1, 1
        for dim in range(len(sizes) - 1, -1, -1):
            elements = elements * sizes[dim]
            follows = dim > 0 and (
                self._int(sizes[dim - 1]) == 1
                or self._int(strides[dim - 1]) == self._int(elements * base)
            )
            if follows:
                continue
            covered: Any = 1
            while at >= 0 and (
                self._int(covered) < self._int(elements) or self._int(shape[at]) == 1
            ):
                found[at] = covered * base
                covered = covered * shape[at]
                at -= 1
            if dim > 0:
                base, elements = strides[dim - 1], 1
        return found

    def _describe(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._layout(value)
        return self._int(value)

    def _layout(self, tensor: torch.Tensor) -> Layout:
        shape, stride = tuple(map(self._int, tensor.shape)), tuple(map(self._int, tensor.stride()))
        return Layout(str(tensor.dtype).removeprefix("torch."), str(tensor.device), shape, stride)

    def _int(self, size: int | torch.SymInt) -> int:
        return int(self._number(size_of(size)))


class _UnknownLayoutError(Exception):
    """A value does not say all that the layout of a result follows from."""


def _described(value: Any) -> Any:
    """Return all of an op's argument or result that layouts follow from, to be looked up.

    Raises:
        _UnknownLayoutError: It is a kind of value that is not described here.
    """
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise _UnknownLayoutError
        return value.dtype, value.device, sizes_of(value.shape), sizes_of(value.stride())
    if isinstance(value, (list, tuple)):
        return tuple(map(_described, value))
    if isinstance(value, dict):
        return tuple((name, _described(v)) for name, v in value.items())
    if isinstance(value, torch.SymInt):
        return "size", size_of(value)
    if value is None or type(value) in _PLAIN_TYPES:
        return type(value), value  # one, true and 1.0 are equal
    raise _UnknownLayoutError


def _strides_of_view(op: Any, args: Any, kwargs: Any) -> list[tuple[int, ...]] | None:
    """Return the strides of the views that an op makes; None where it has no description."""

    def bare(value: Layout) -> torch.Tensor:
        dtype = getattr(torch, value.dtype)
        return torch.empty_strided(value.shape, value.stride, dtype=dtype, device="meta")

    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        given = tree_map_only(Layout, bare, (args, kwargs))
        try:
            return [tuple(t.stride()) for t in _tensors(op(*given[0], **given[1]))]
        except RuntimeError:
            return None


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _is_known(values: Any) -> bool:
    """Tell whether no size depends on data."""
    kinds = (torch.Tensor, torch.SymInt)
    found = [value for value in tree_leaves(values) if isinstance(value, kinds)]
    numbers = (torch.SymFloat, torch.SymBool)
    if any(isinstance(value, numbers) for value in tree_leaves(values)):
        return False
    return not any(has_free_unbacked_symbols(value) for value in found)


def _dense(shape: Sequence[Any], order: Sequence[int]) -> list[Any]:
    """Return the strides of a tensor without gaps whose dimensions are ordered as in ``order``."""
    stride: list[Any] = [1] * len(shape)
    after: Any = 1
    for dim in sorted(range(len(shape)), key=lambda d: (order[d], -d)):
        stride[dim] = after
        after = after * shape[dim]
    return stride
