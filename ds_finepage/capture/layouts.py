"""The strides that ops really give their results.

A fake tensor's strides come from torch's own description of an op, and for some ops (normalizations
of channels-last images) the kernel lays its result out in another way. The next op may then choose
another algorithm, whose last bits are others. So an op that is met for the first time is asked what
it really does; see :class:`StridesOf`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ds_finepage._compat.torch import FakeTensor, tree_leaves, tree_map_only
from ds_finepage.capture.lengths import Evaluator, size_of
from ds_finepage.errors import CaptureError
from ds_finepage.graph.layout import Layout

_PLAIN_TYPES = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)

StridesOf = Callable[[Any, Any, Any, Sequence[Layout], bool], Sequence[tuple[int, ...]] | None]
"""Runs an op on scratch tensors and returns the strides of each result that is a tensor; None where
they are not known. Takes the overload, its arguments and named arguments with a :class:`Layout` for
each tensor, what torch says of the results, and whether they are views of an argument."""


class LayoutFixer:
    """Gives the results of fake ops the strides that the real ops give them."""

    def __init__(self, strides_of: StridesOf, values: Mapping[str, int]) -> None:
        """Ask ``strides_of``, with these values for the symbols of sizes."""
        self._strides_of = strides_of
        self._number = Evaluator(values)

    def __call__(self, op: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Return the result of a fake op, with the right strides.

        Raises:
            CaptureError: The strides cannot be said in terms of the symbols.
        """
        made = _tensors(result)
        if op._schema.is_mutable or not made or not all(isinstance(t, FakeTensor) for t in made):
            return result
        try:
            call = self._described(args), self._described(kwargs)
            described = [self._described(t) for t in made]
        except _UnknownLayoutError:
            return result
        given = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        is_view = any(t.untyped_storage()._cdata in given for t in made)
        found = self._strides_of(op, *call, described, is_view)
        if found is None or all(d.stride == s for d, s in zip(described, found, strict=True)):
            return result
        strides = {id(t): s for t, s in zip(made, found, strict=True)}
        source = args[0] if is_view else None
        return tree_map_only(
            torch.Tensor, lambda t: self._with_strides(t, strides[id(t)], source), result
        )

    def _described(self, value: Any) -> Any:
        """Return a value with a :class:`Layout` for each tensor; refuse what is not known."""
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            dtype = str(value.dtype).removeprefix("torch.")
            sizes = (tuple(map(self._int, n)) for n in (value.shape, value.stride()))
            return Layout(dtype, str(value.device), *sizes)
        if isinstance(value, (list, tuple)):
            return list(map(self._described, value))
        if isinstance(value, dict):
            return {name: self._described(v) for name, v in value.items()}
        if value is None or type(value) in _PLAIN_TYPES:
            return value
        if isinstance(value, torch.SymInt):
            return self._int(value)
        raise _UnknownLayoutError

    def _with_strides(
        self, tensor: torch.Tensor, wanted: tuple[int, ...], source: torch.Tensor | None
    ) -> torch.Tensor:
        """Return a fake tensor like another, with other strides: a view of ``source``, or new."""
        if tuple(map(self._int, tensor.stride())) == wanted:
            return tensor
        stride: Sequence[Any] = wanted
        if any(isinstance(n, torch.SymInt) for n in (*tensor.shape, *tensor.stride())):
            if source is None:
                outer_first = sorted(range(tensor.dim()), key=lambda d: (-wanted[d], d))
                stride = torch.empty_permuted(tensor.shape, outer_first).stride()
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

    def _int(self, size: int | torch.SymInt) -> int:
        try:
            return int(self._number(size_of(size)))
        except NameError as error:  # in a formula of what is known in the pass only
            raise _UnknownLayoutError from error


class _UnknownLayoutError(Exception):
    """A value does not say all that the layout of a result follows from."""


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
