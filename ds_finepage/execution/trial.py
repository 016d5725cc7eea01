"""Tries a task on a small arena of its own, to see what it writes.

Some ops use the tensor that is given as ``out=`` for their own work and resize it meanwhile. In an
arena that overwrites the extents beside it. Others take tensors of one storage for the same tensor,
or count from where the storage begins. Nothing in an op's schema tells. So each is run once with
memory of its own for every tensor, and once as the executor would run it, with guard bytes before
and after every buffer. It passes if nothing has changed but the results, and if these are the same.
"""

from __future__ import annotations

from typing import Any

import torch

from ds_finepage.execution.arena import view_of
from ds_finepage.execution.host_ops import host_bytes
from ds_finepage.execution.ops import (
    BoundTask,
    bind,
    contents_mean_nothing,
    flat_results,
    is_random,
    plain_call,
)
from ds_finepage.graph.arguments import refs
from ds_finepage.graph.packed import PACKED_GROUPED
from ds_finepage.graph.routes import Groups, groups_of
from ds_finepage.graph.taskgraph import Task, TaskGraph
from ds_finepage.units import align_up

GUARD_BYTES = 512
"""Guard bytes between two buffers, and what buffers are aligned to, as on every device."""

GUARD = 0xA5
"""What guard bytes and unwritten results are filled with."""

TILE_ELEMENTS = 4072
"""Values repeat after so many: enough for the rows of a matrix to differ, a multiple of 8."""

OTHER_RESULTS = "gives other results in the arena than by itself"

CHUNK_BYTES = 16 << 20
"""Bytes that are compared at once; on an accelerator a comparison takes memory."""


def _tile(number: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return bytes to fill scratch with, over and over: one number."""
    count = GUARD_BYTES // dtype.itemsize
    return torch.full((count,), number, dtype=dtype, device=device).view(torch.uint8)


def _random_tile(dtype: torch.dtype, seed: int, device: torch.device) -> torch.Tensor:
    """Return likewise numbers between 1/4 and 3/4, where most functions are defined."""
    numbers = torch.rand(
        TILE_ELEMENTS,
        generator=torch.Generator().manual_seed(seed),
        dtype=dtype if dtype.is_complex else torch.float32,
    )
    return numbers.mul_(0.5).add_(0.25).to(dtype).to(device).view(torch.uint8)


class Trial:
    """One task on scratch tensors that hold random numbers; integers are 0.

    Zeros are valid indices everywhere. But where they would mean that there is nothing to do, there
    is as much as there can be: masks choose everything, and of groups of rows the first has them
    all. Packed matrices are unpacked for each group that has rows, so there the rows are spread.
    """

    def __init__(
        self,
        graph: TaskGraph,
        task: Task,
        device: torch.device,
        unused: frozenset[int] = frozenset(),
    ) -> None:
        self._graph, self._task, self._device, self._unused = graph, task, device, unused
        self._guard = _tile(GUARD, torch.uint8, device)
        self._made = {*task.writes, *task.touches} - {*task.reads}
        self._changed = sorted({*task.writes} & {*task.reads})
        self._nbytes = {b: reach(graph, task, b) for b in task.buffers}
        self._offsets: dict[int, int] = {}
        end = GUARD_BYTES
        for buffer in task.buffers:
            self._offsets[buffer] = end
            end += align_up(self._nbytes[buffer], GUARD_BYTES) + GUARD_BYTES
        self._end = end
        self._arena = torch.empty(0, dtype=torch.uint8, device=device)
        self._tensors: dict[int, torch.Tensor] = {}
        self._looks: dict[int, tuple[Any, ...]] = {}

    def alone(self) -> list[torch.Tensor]:
        """Run the op with memory of its own for every tensor.

        Returns:
            Copies in host memory of its results and of what it has changed.
        """
        if contents_mean_nothing(self._task):
            return []
        given: dict[int, torch.Tensor] = {}
        for buffer in {*self._task.buffers} - self._made:
            given[buffer] = self._empty(self._nbytes[buffer])
            _repeat(self._tile_of(buffer), given[buffer])

        def tensor(index: int) -> torch.Tensor:
            view = self._graph.tensors[index]
            return view_of(given[view.buffer], view)

        self._seed()
        op, args, kwargs = plain_call(self._task, tensor)
        flat = flat_results(op(*args, **kwargs))
        results = [f for f, r in zip(flat, self._task.results, strict=True) if self._is_kept(r)]
        return [_on_host(t) for t in (*results, *(given[b] for b in self._changed))]

    def bind(self, *, into_place: bool) -> BoundTask:
        """Bind the task to scratch tensors that lie in one storage, between guard bytes."""
        self._arena = self._empty(self._end)
        self._tensors, self._looks = {}, {}
        _repeat(self._guard, self._arena)
        for buffer in {*self._task.buffers} - self._made:
            _repeat(self._tile_of(buffer), self._bytes(buffer))
        self._seed()
        return bind(
            self._task, self._tensor, patches=[], unused=self._unused, into_place=into_place
        )

    def fault(self, wanted: list[torch.Tensor]) -> str | None:
        """Say what a bound task that has run once did wrong; None if nothing.

        ``wanted`` is what :meth:`alone` returned.
        """
        for index, look in self._looks.items():
            if _look(self._tensors[index]) != look:
                return "resizes a tensor that it is given"
        kept = [r for r in self._task.results if r is not None and self._is_kept(r)]
        results = [self._tensors[r] for r in kept]
        found = (*results, *(self._bytes(b) for b in self._changed))
        for one, other in zip(found, wanted, strict=bool(wanted)):
            if not same(_on_host(one), other):
                return OTHER_RESULTS
        for result in self._task.results:
            if result is not None and self._buffer(result) in self._made:
                # So that what is left was written beside it.
                _erase(self._tensors[result], self._guard)
        end = 0
        for buffer, offset in self._offsets.items():
            if not _holds(self._arena[end:offset], self._guard):
                return "writes beyond its tensors"
            end = offset + self._nbytes[buffer]
            is_made = buffer in self._made
            tile = self._guard if is_made else self._tile_of(buffer)
            if buffer not in self._changed and not _holds(self._bytes(buffer), tile):
                return "writes beyond its results" if is_made else "changes what it only reads"
        return None if _holds(self._arena[end:], self._guard) else "writes beyond its tensors"

    def _seed(self) -> None:
        """Let a random op draw the same numbers each time; it takes a while."""
        if is_random(self._task):
            torch.manual_seed(0)

    def _is_kept(self, result: int | None) -> bool:
        return (
            result is not None and result not in self._unused and self._buffer(result) in self._made
        )

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _bytes(self, buffer: int) -> torch.Tensor:
        offset = self._offsets[buffer]
        return self._arena[offset : offset + self._nbytes[buffer]]

    def _buffer(self, tensor: int) -> int:
        return self._graph.tensors[tensor].buffer

    def _tensor(self, index: int) -> torch.Tensor:
        if index not in self._tensors:
            view = self._graph.tensors[index]
            found = view_of(self._arena, view, self._offsets[view.buffer])
            self._tensors[index], self._looks[index] = found, _look(found)
        return self._tensors[index]

    def _tile_of(self, buffer: int) -> torch.Tensor:
        views = [self._graph.tensors[t] for t in tensor_ids(self._task)]
        dtypes = {v.dtype for v in views if v.buffer == buffer}
        dtype: torch.dtype = getattr(torch, dtypes.pop()) if len(dtypes) == 1 else torch.uint8
        if dtype.is_floating_point or dtype.is_complex:
            return _random_tile(dtype, self._task.buffers.index(buffer), self._device)
        groups = groups_of(self._task)
        if groups is not None and self._buffer(groups.ends) == buffer:
            return self._ends_of(groups, dtype)
        return _tile(int(dtype is torch.bool), dtype, self._device)

    def _ends_of(self, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
        """Return the ends of groups of rows."""
        num_rows = self._graph.tensors[groups.rows].shape[0]
        if self._task.op != PACKED_GROUPED:
            return _tile(num_rows, dtype, self._device)
        num_groups = self._graph.tensors[groups.ends].shape[0]
        ends = [num_rows * (group + 1) // num_groups for group in range(num_groups)]
        ends += [num_rows] * (-num_groups % 8)  # a tile is whole words
        return torch.tensor(ends, dtype=dtype, device=self._device).view(torch.uint8)


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
    given = (ref.tensor for ref in refs((task.args, task.kwargs)))
    return [*(r for r in task.results if r is not None), *given]


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


def _erase(tensor: torch.Tensor, guard: torch.Tensor) -> None:
    """Fill the elements of a tensor, and no byte between them, with guard bytes."""
    if tensor.dtype is torch.bool:
        tensor = tensor.view(torch.uint8)
    tensor.copy_(guard[: tensor.itemsize].view(tensor.dtype)[0])


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    found = host_bytes(tensor.nbytes, pinned=False).view(tensor.dtype).view(tensor.shape)
    return found.copy_(tensor)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors in host memory are equal, NaN where the other has NaN."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    if first.numel() % 8 == 0:
        first, second = first.view(torch.int64), second.view(torch.int64)
    if torch.equal(first, second):
        return True
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
