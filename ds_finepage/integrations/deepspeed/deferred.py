"""Tensors of a checkpoint that keep the ops on them for later.

transformers converts such a tensor as any other: it casts it, stacks the matrices of experts, makes
a parameter of it. Nothing is read. Once it is known which part of a parameter a rank needs, that
part is read, and the ops run. Only that part is in memory, if the tensor was only cast, and one of
several tensors that were joined. Other ops run on whole tensors.

Imported only while a checkpoint is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, cast

import torch

from ds_finepage._compat.torch import _disabled_torch_function_impl, tree_leaves, tree_map_only
from ds_finepage.errors import ConfigError
from ds_finepage.integrations.deepspeed.checkpoint_files import PIECE_BYTES, Region, trim_heap

SAME = (torch.ops.aten.alias, torch.ops.aten.detach)
"""Ops that return the values of their tensor."""

JOINS = (torch.ops.aten.stack, torch.ops.aten.cat)
"""Ops whose tensors are read one by one."""

Part = tuple[range, ...]
"""The indices of a tensor that belong to a part of it, a range for each dimension."""


@dataclass(frozen=True, slots=True)
class Call:
    """An op that has not run.

    Attributes:
        op: An op of ATen.
        args: Its arguments; some are deferred tensors.
        kwargs: Its arguments by name.
        index: Which of its results is meant.
    """

    op: Any
    args: Any
    kwargs: Any
    index: int

    def value(self) -> torch.Tensor:
        """Run the op."""
        trim_heap()  # of what the ops before this one made
        args, kwargs = tree_map_only(DeferredTensor, DeferredTensor.value, (self.args, self.kwargs))
        return cast(torch.Tensor, tree_leaves(self.op(*args, **kwargs))[self.index])


class DeferredTensor(torch.Tensor):
    """A tensor on the CPU that has no values yet.

    Attributes:
        origin: Where they are, or the op that makes them.
    """

    origin: Region | Call

    @staticmethod
    def __new__(cls, like: torch.Tensor, origin: Region | Call) -> DeferredTensor:
        """Make the shell, with the shape, strides and dtype of another tensor."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype
        )
        assert isinstance(made, cls)
        made.origin = origin
        return made

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, region: Region) -> DeferredTensor:
        """Return the tensor of a file."""
        return cls(torch.empty(region.shape, dtype=region.dtype, device="meta"), region)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Keep an op for later; run one whose results have no shape before it ran.

        Raises:
            ConfigError: The op writes.
        """
        kwargs = kwargs or {}
        if op._schema.is_mutable:
            raise ConfigError(
                f"this checkpoint cannot be loaded shard by shard: its conversion writes by {op}. "
                f"Load the model before HfDeepSpeedConfig is made."
            )
        try:
            shells = tree_map_only(torch.Tensor, _shell, (args, kwargs))
            where = {"device": torch.device("meta")} if "device" in kwargs else {}
            results = op(*shells[0], **{**shells[1], **where})
        except (NotImplementedError, RuntimeError):
            results = None
        leaves = tree_leaves(results)
        if results is None or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            args, kwargs = tree_map_only(cls, cls.value, (args, kwargs))
            return op(*args, **kwargs)
        made = iter([cls(leaf, Call(op, args, kwargs, i)) for i, leaf in enumerate(leaves)])
        return tree_map_only(torch.Tensor, lambda _: next(made), results)

    def value(self) -> torch.Tensor:
        """Return the tensor with its values."""
        if isinstance(self.origin, Call):
            return self.origin.value()
        return self.origin.read(0, self.origin.num_elements).view(self.origin.shape)

    def read_into(self, target: torch.Tensor, part: Part) -> None:
        """Copy a part of the values into a tensor.

        Args:
            target: In the shape of the part; it gets the values in its dtype.
            part: Of this tensor.
        """
        _read(self, part, target, [])


def whole_of(tensor: torch.Tensor) -> Part:
    """Return the part of a tensor that is all of it."""
    return tuple(map(range, tensor.shape))


def _shell(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _read(source: Any, part: Part, target: torch.Tensor, casts: list[torch.dtype]) -> None:
    """Copy a part of a tensor into another.

    Args:
        source: Any tensor.
        part: Of the source.
        target: In the shape of the part.
        casts: The dtypes to cast to, one after the other.
    """
    origin = source.origin if isinstance(source, DeferredTensor) else None
    op = origin.op.overloadpacket if isinstance(origin, Call) else None
    if isinstance(origin, Region):
        _read_region(origin, part, target, casts)
    elif origin is None:
        _copy(target, _taken(source, part), casts)
    elif op is torch.ops.aten._to_copy:
        _read(origin.args[0], part, target, [source.dtype, *casts])
    elif op in SAME:
        _read(origin.args[0], part, target, casts)
    elif op in JOINS and part == whole_of(source):
        for each, place in zip(origin.args[0], _places(origin, target), strict=True):
            _read(each, whole_of(each), place, casts)
    else:
        _copy(target, _taken(origin.value(), part), casts)


def _taken(tensor: torch.Tensor, part: Sequence[range]) -> torch.Tensor:
    return tensor[tuple(slice(each.start, each.stop) for each in part)]


def _places(call: Call, target: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return where in the result of a join each of the joined tensors lies."""
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    if call.op.overloadpacket is torch.ops.aten.stack:
        found = target.unbind(dim)
    else:
        found = target.split([each.shape[dim] for each in call.args[0]], dim)
    return cast(Sequence[torch.Tensor], found)


def _read_region(
    region: Region, part: Part, target: torch.Tensor, casts: Sequence[torch.dtype]
) -> None:
    """Read a part piece by piece."""
    if target.numel() == 0:
        return
    row_elements = math.prod(region.shape[1:])
    rows = part[0] if part else range(1)
    if part[1:] == tuple(map(range, region.shape[1:])) and target.is_contiguous():
        start, flat = rows.start * row_elements, target.view(-1)
        step = max(1, PIECE_BYTES // region.dtype.itemsize)
        for i in range(0, flat.numel(), step):
            stop = min(i + step, flat.numel())
            _copy(flat[i:stop], region.read(start + i, start + stop), casts)
        return
    step = max(1, PIECE_BYTES // (row_elements * region.dtype.itemsize))
    for i in range(0, len(rows), step):
        first, last = rows[i], rows[min(i + step, len(rows)) - 1] + 1
        piece = region.read(first * row_elements, last * row_elements)
        piece = piece.view(last - first, *region.shape[1:])
        _copy(target[i : i + step], _taken(piece, (range(last - first), *part[1:])), casts)


def _copy(target: torch.Tensor, values: torch.Tensor, casts: Sequence[torch.dtype]) -> None:
    for dtype in casts:
        values = values.to(dtype)
    target.copy_(values)


def part_of(whole: torch.Tensor, cut: torch.Tensor) -> Part | None:
    """Return which part of a tensor a view of it is.

    Args:
        whole: Contiguous, with its own storage; it may be on the meta device.
        cut: Any tensor.

    Returns:
        None where it is not a view of the whole, or no range of each dimension.
    """
    storages = whole.untyped_storage()._cdata, cut.untyped_storage()._cdata
    if storages[0] != storages[1] or whole.stride() != cut.stride() or whole.dim() != cut.dim():
        return None
    found, offset = [], int(cut.storage_offset())
    for length, stride in zip(cut.shape, cut.stride(), strict=True):
        start, offset = divmod(offset, stride)
        found.append(range(start, start + length))
    fits = all(starmap(lambda r, size: r.stop <= size, zip(found, whole.shape, strict=True)))
    return tuple(found) if fits and offset == 0 else None
