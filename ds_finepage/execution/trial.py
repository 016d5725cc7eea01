"""Tries a task on scratch tensors between guard bytes, to see what it writes (floor 2).

Some ops use the tensor that is given as ``out=`` for their own work and resize it meanwhile; in an
arena that overwrites the neighbours. Nothing in an op's schema tells, so each is tried once: on
values that show a change, with guard bytes around every buffer. It passes if nothing has changed
but the results, and if these are bit by bit what the op returns without ``out=``.
"""

from __future__ import annotations

from typing import Any

import torch

from ds_finepage.execution.arena import view_of
from ds_finepage.execution.host_ops import host_bytes
from ds_finepage.execution.ops import BoundTask, bind, flat_results, has_out_form
from ds_finepage.graph.taskgraph import Ref, Task, TaskGraph

GUARD_BYTES = 512
"""On either side of a buffer; it keeps the alignment of extents."""

GUARD = 0xA5
"""What guard bytes and unwritten results are filled with."""

TILE_ELEMENTS = 4072
"""Values repeat after so many: enough for the rows of a matrix to differ, a multiple of 8."""

CHUNK_BYTES = 16 << 20
"""Bytes that are compared at once; on CUDA a comparison takes memory."""


def scratch_bytes(graph: TaskGraph, task: Task) -> int:
    """Return the device bytes that a trial of a task takes, apart from the op's own workspace."""
    return sum(_padded(reach(graph, task, b)) for b in task.buffers)


class Tiles:
    """Short runs of bytes to fill scratch with, over and over.

    Attributes:
        device: Where they are, and the scratch with them.
        guard: Guard bytes.
        zeros: Zeros.
    """

    def __init__(self, device: torch.device) -> None:
        """Make those that every trial needs."""
        self.device = device
        self.guard = torch.full((GUARD_BYTES,), GUARD, dtype=torch.uint8, device=device)
        self.zeros = torch.zeros(GUARD_BYTES, dtype=torch.uint8, device=device)
        self._random: dict[torch.dtype, torch.Tensor] = {}

    def random(self, dtype: torch.dtype) -> torch.Tensor:
        """Return numbers between 1/4 and 3/4, where most functions are defined."""
        if dtype not in self._random:
            numbers = torch.rand(
                TILE_ELEMENTS,
                generator=torch.Generator().manual_seed(0),
                dtype=dtype if dtype.is_complex else torch.float32,
            )
            numbers = (numbers.mul_(0.5).add_(0.25)).to(dtype)
            self._random[dtype] = numbers.view(torch.uint8).to(self.device)
        return self._random[dtype]


class Trial:
    """One task on scratch tensors that hold random numbers; integers and booleans are 0.

    Zeros are valid indices everywhere.
    """

    def __init__(
        self, graph: TaskGraph, task: Task, tiles: Tiles, unused: frozenset[int] = frozenset()
    ) -> None:
        """Make scratch for what the task reads; what it makes gets its own when it is bound.

        Args:
            graph: Where the task stands.
            task: What to try.
            tiles: What to fill scratch with, and on which device.
            unused: Results that nobody reads; see :func:`ds_finepage.execution.ops.bind`.
        """
        self._unused = unused
        self._graph, self._task, self._tiles = graph, task, tiles
        self._made = {*task.writes, *task.touches} - {*task.reads}
        self._changed = {*task.writes} & {*task.reads}
        self._scratch: dict[int, torch.Tensor] = {}
        self._tensors: dict[int, torch.Tensor] = {}
        self._looks: dict[int, tuple[Any, ...]] = {}
        self._fill({*task.buffers} - self._made)

    def wanted(self) -> list[torch.Tensor] | None:
        """Run the op without ``out=`` and return copies of its results in host memory.

        Call it before :meth:`bind`, so that there is but one set of results on the device.

        Returns:
            None for a task that has one form only.
        """
        if not has_out_form(self._task):
            return None

        def given(index: int) -> torch.Tensor | None:
            return None if self._buffer(index) in self._made else self._tensor(index)

        bound = bind(self._task, given, patches=[], into_place=False)
        op, args, kwargs, _ = bound.args
        return [_on_host(r) for r in flat_results(op(*args, **kwargs))]

    def bind(self, *, into_place: bool) -> BoundTask:
        """Bind the task to fresh scratch tensors for what it makes."""
        self._fill(self._made)
        return bind(
            self._task, self._tensor, patches=[], unused=self._unused, into_place=into_place
        )

    def fault(self, wanted: list[torch.Tensor] | None) -> str | None:
        """Say what a task that has run did wrong; None if nothing.

        Args:
            wanted: What its results must be, where that is known.
        """
        for index, look in self._looks.items():
            if _look(self._tensors[index]) != look:
                return "resizes a tensor that it is given"
        made = [r for r in self._task.results if r is not None and self._buffer(r) in self._made]
        for result, value in zip(made, wanted or [], strict=False):
            if not _same_bytes(_on_host(self._tensors[result]), value):
                return "gives other results with out= than without"
        for result in made:
            _erase(self._tensors[result])  # so that what is left was written beside them
        for buffer, scratch in self._scratch.items():
            if buffer in self._made:
                if not _holds(scratch, self._tiles.guard):
                    return "writes beyond its results"
                continue
            within = scratch.numel() - 2 * GUARD_BYTES
            parts = scratch.split([GUARD_BYTES, within, GUARD_BYTES])
            if not all(_holds(g, self._tiles.guard) for g in parts[::2]):
                return "writes beyond its arguments"
            if buffer not in self._changed and not _holds(parts[1], self._tile_of(buffer)):
                return "changes what it only reads"
        return None

    def _fill(self, buffers: set[int]) -> None:
        for buffer in sorted(buffers):
            nbytes = _padded(reach(self._graph, self._task, buffer))
            scratch = torch.empty(nbytes, dtype=torch.uint8, device=self._tiles.device)
            _repeat(self._tiles.guard, scratch)
            if buffer not in self._made:
                _repeat(self._tile_of(buffer), scratch[GUARD_BYTES : nbytes - GUARD_BYTES])
            self._scratch[buffer] = scratch

    def _buffer(self, tensor: int) -> int:
        return self._graph.tensors[tensor].buffer

    def _tensor(self, index: int) -> torch.Tensor:
        view = self._graph.tensors[index]
        found = view_of(self._scratch[view.buffer], view, GUARD_BYTES)
        self._tensors[index], self._looks[index] = found, _look(found)
        return found

    def _tile_of(self, buffer: int) -> torch.Tensor:
        views = [self._graph.tensors[t] for t in tensor_ids(self._task)]
        dtypes = {v.dtype for v in views if v.buffer == buffer}
        dtype: torch.dtype = getattr(torch, dtypes.pop()) if len(dtypes) == 1 else torch.uint8
        if dtype.is_floating_point or dtype.is_complex:
            return self._tiles.random(dtype)
        return self._tiles.zeros


def reach(graph: TaskGraph, task: Task, buffer: int) -> int:
    """Bytes of a buffer that a task's views reach, so that a slice of a large one stays small."""
    found = 0
    for index in tensor_ids(task):
        view = graph.tensors[index]
        if view.buffer == buffer and 0 not in view.shape:
            last = view.offset + sum(
                (n - 1) * s for n, s in zip(view.shape, view.stride, strict=True)
            )
            found = max(found, (last + 1) * getattr(torch, view.dtype).itemsize)
    return found


def tensor_ids(task: Task) -> list[int]:
    """List the tensors among a task's results and arguments."""
    found: list[int] = [r for r in task.results if r is not None]

    def collect(value: Any) -> None:
        if isinstance(value, Ref):
            found.append(value.tensor)
        elif isinstance(value, tuple):
            for item in value:
                collect(item)

    collect(task.args)
    collect(task.kwargs)
    return found


def _padded(nbytes: int) -> int:
    return GUARD_BYTES + nbytes + GUARD_BYTES


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    return tensor.shape, tensor.stride(), tensor.data_ptr(), storage.data_ptr(), storage.nbytes()


def _rows(of: torch.Tensor, tile: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut bytes into rows as long as a tile, and what is left over."""
    whole = of.numel() // tile.numel() * tile.numel()
    return of[:whole].view(-1, tile.numel()), of[whole:]


def _repeat(tile: torch.Tensor, target: torch.Tensor) -> None:
    rows, rest = _rows(target, tile)
    rows.copy_(tile.expand_as(rows))
    rest.copy_(tile[: rest.numel()])


def _holds(found: torch.Tensor, tile: torch.Tensor) -> bool:
    """Tell whether bytes are what :func:`_repeat` has written."""
    rows, rest = _rows(found, tile)
    if not torch.equal(rest, tile[: rest.numel()]):
        return False
    if found.storage_offset() % 8 == 0:
        rows, tile = rows.view(torch.int64), tile.view(torch.int64)
    return all(
        torch.equal(chunk, tile.expand_as(chunk))
        for chunk in rows.split(max(1, CHUNK_BYTES // tile.nbytes))
    )


def _erase(tensor: torch.Tensor) -> None:
    """Fill the elements of a tensor, and no byte between them, with guard bytes."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    value = int.from_bytes(bytes([GUARD] * tensor.itemsize), "little", signed=tensor.itemsize > 1)
    tensor.view(integer).fill_(value)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    found = host_bytes(tensor.nbytes, pinned=False).view(tensor.dtype).view(tensor.shape)
    return found.copy_(tensor)


def _same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    if first.numel() % 8 == 0:
        first, second = first.view(torch.int64), second.view(torch.int64)
    return torch.equal(first, second)
