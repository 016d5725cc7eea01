"""Tensors of a checkpoint that keep the ops on them for later.

transformers converts such a tensor as any other: it casts it, stacks the matrices of experts, makes
a parameter of it. Nothing is read. The ops run when the values are copied into memory that stays: a
whole parameter, or the part of it that a rank needs. Casts, parts and joins of tensors are read
piece by piece. Other ops run on whole tensors.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import starmap
from typing import Any, cast

import torch

from ds_finepage._compat.torch import _disabled_torch_function_impl, tree_leaves, tree_map_only
from ds_finepage.errors import ConfigError
from ds_finepage.integrations.deepspeed.checkpoint_files import Region, regions_of, trim_heap

PIECE_BYTES = 4 << 20
"""What is held of a tensor while it is copied; a row, where that is larger."""

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
        part: The part of its first argument that this is; None if it is something else.
    """

    op: Any
    args: Any
    kwargs: Any
    index: int
    part: Part | None

    def value(self) -> torch.Tensor:
        """Run the op."""
        trim_heap()  # of what the ops before this one made
        return cast(torch.Tensor, tree_leaves(_run(self.op, self.args, self.kwargs))[self.index])


class DeferredTensor(torch.Tensor):
    """A tensor on the CPU that has no values yet.

    Attributes:
        origin: Where they are, the op that makes them, or they themselves, once an op has written.
        is_alone: No other deferred tensor has its values, or follows from them.
    """

    origin: Region | Call | torch.Tensor
    is_alone: bool

    @staticmethod
    def __new__(cls, like: torch.Tensor, origin: Region | Call, is_alone: bool) -> DeferredTensor:
        """Make the shell, with the shape, strides and dtype of another tensor."""
        made = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype
        )
        assert isinstance(made, cls)
        made.origin, made.is_alone = origin, is_alone
        return made

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Keep an op for later; run one that writes, or whose results are not known before.

        Raises:
            ConfigError: The op writes into a deferred tensor that is not alone.
        """
        kwargs = kwargs or {}
        if op._schema.is_mutable:
            return _write(op, args, kwargs)
        found = _kept(op, args, kwargs)
        return _run(op, args, kwargs) if found is None else found

    def value(self) -> torch.Tensor:
        """Return the tensor with its values."""
        if isinstance(self.origin, torch.Tensor):
            return self.origin
        if isinstance(self.origin, Call):
            return self.origin.value()
        return self.origin.read(0, self.numel()).view(self.shape)

    def read_into(self, target: torch.Tensor, part: Part) -> None:
        """Copy a part of the values into a tensor.

        Args:
            target: In the shape of the part; it gets the values in its dtype.
            part: Of this tensor.
        """
        _read(self, part, target, [])


def open_files(paths: Iterable[str | os.PathLike[str]]) -> dict[str, torch.Tensor] | None:
    """Return the tensors of safetensors files, unread.

    Returns:
        None where there are none, or one is in a dtype that means something else in torch.

    Raises:
        safetensors.SafetensorError: A file is not valid.
    """
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        regions = regions_of(path)
        if regions is None:
            return None
        for name, region in regions.items():
            like = torch.empty(region.shape, dtype=region.dtype, device="meta")
            found[name] = DeferredTensor(like, region, is_alone=True)
    return found or None


def value_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with its values, whether they are read or not."""
    return tensor.value() if isinstance(tensor, DeferredTensor) else tensor


def whole_of(tensor: torch.Tensor) -> Part:
    """Return the part of a tensor that is all of it."""
    return tuple(map(range, tensor.shape))


def _kept(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the results of an op that runs later; None if their shapes are not known before."""
    if torch.device(kwargs.get("device") or "cpu").type != "cpu":
        return None
    shells: list[torch.Tensor] = []

    def shell(tensor: torch.Tensor) -> torch.Tensor:
        like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        shells.append(like)
        return like

    try:
        like, named = tree_map_only(torch.Tensor, shell, (args, kwargs))
        results = op(*like, **named | ({"device": "meta"} if "device" in kwargs else {}))
    except (NotImplementedError, RuntimeError):
        return None
    leaves = tree_leaves(results)
    if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    made = []
    for i, leaf in enumerate(leaves):
        is_new = all(leaf.untyped_storage()._cdata != s.untyped_storage()._cdata for s in shells)
        part = None if is_new else part_of(shells[0], leaf)
        made.append(DeferredTensor(leaf, Call(op, args, kwargs, i, part), is_alone=is_new))
    for tensor in tree_leaves((args, kwargs)):
        if isinstance(tensor, DeferredTensor):
            tensor.is_alone = False
    left = iter(made)
    return tree_map_only(torch.Tensor, lambda _: next(left), results)


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    args, kwargs = tree_map_only(DeferredTensor, value_of, (args, kwargs))
    return op(*args, **kwargs)


def _write(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op that writes; a copy of unread values reads them piece by piece."""
    if op is torch.ops.aten.copy_.default:
        target, source = args[:2]
        if not isinstance(target, DeferredTensor) and target.shape == source.shape:
            source.read_into(target, whole_of(source))
            return target
    for given, argument in zip(args, op._schema.arguments, strict=False):
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if not is_written or not isinstance(given, DeferredTensor):
            continue
        if not given.is_alone:
            raise ConfigError(
                f"this checkpoint cannot be loaded piece by piece: its conversion writes by {op} "
                f"into a tensor that it has used before. Load the model before HfDeepSpeedConfig "
                f"is made."
            )
        given.origin = given.value()
    return _run(op, args, kwargs)


def _read(source: Any, part: Part, target: torch.Tensor, casts: list[torch.dtype]) -> None:
    """Copy a part of a tensor into one in its shape, cast to one dtype after the other."""
    origin = source.origin if isinstance(source, DeferredTensor) else source
    op = origin.op.overloadpacket if isinstance(origin, Call) else None
    if isinstance(origin, Region):
        _read_region(origin, part, target, casts)
    elif isinstance(origin, torch.Tensor):
        _copy(target, _taken(origin, part), casts)
    elif op is torch.ops.aten._to_copy:
        _read(origin.args[0], part, target, [source.dtype, *casts])
    elif origin.part is not None:
        pairs = zip(part, origin.part, strict=True)
        inner = tuple(range(o.start + p.start, o.start + p.stop) for p, o in pairs)
        _read(origin.args[0], inner, target, casts)
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
    """Read a part some rows at a time."""
    if target.numel() == 0:
        return
    rows, *columns = part or (range(1),)
    target, shape = target.view(1) if target.dim() == 0 else target, region.shape[1:]
    row_elements = math.prod(shape)
    step = max(1, PIECE_BYTES // (row_elements * region.dtype.itemsize))
    for i in range(0, len(rows), step):
        taken = rows[i : i + step]
        piece = region.read(taken.start * row_elements, taken.stop * row_elements)
        piece = piece.view(len(taken), *shape)
        _copy(target[i : i + step], _taken(piece, (range(len(taken)), *columns)), casts)


def _copy(target: torch.Tensor, values: torch.Tensor, casts: Sequence[torch.dtype]) -> None:
    for dtype in casts:
        values = values.to(dtype)
    target.copy_(values)


def part_of(whole: torch.Tensor, cut: torch.Tensor) -> Part | None:
    """Return which part of a tensor a view of it is.

    Args:
        whole: Has its own storage; it may be on the meta device.
        cut: Any tensor.

    Returns:
        None where it is not a view of the whole, or no range of each dimension, or the whole is
        not contiguous.
    """
    storages = whole.untyped_storage()._cdata, cut.untyped_storage()._cdata
    if storages[0] != storages[1] or whole.stride() != cut.stride() or not whole.is_contiguous():
        return None
    found, offset = [], int(cut.storage_offset())
    for length, stride in zip(cut.shape, cut.stride(), strict=True):
        start, offset = divmod(offset, stride)
        found.append(range(start, start + length))
    fits = all(starmap(lambda r, size: r.stop <= size, zip(found, whole.shape, strict=True)))
    return tuple(found) if fits and offset == 0 else None
