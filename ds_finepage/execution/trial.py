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


def _random_tile(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return numbers between 1/4 and 3/4, where most functions are defined."""
    numbers = torch.rand(
        TILE_ELEMENTS,
        generator=torch.Generator().manual_seed(seed),
        dtype=dtype if dtype.is_complex else torch.float32,
    )
    return numbers.mul_(0.5).add_(0.25).to(dtype)


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
        self._made = {*task.writes, *task.touches} - {*task.reads}
        self._changed = sorted({*task.writes} & {*task.reads})
        self._nbytes = {b: reach(graph, task, b) for b in task.buffers}
        self._offsets: dict[int, int] = {}
        end = GUARD_BYTES
        for buffer in task.buffers:
            self._offsets[buffer] = end
            end += align_up(self._nbytes[buffer], GUARD_BYTES) + GUARD_BYTES
        self._image = host_bytes(end, pinned=False).fill_(GUARD)  # what the arena should hold
        for buffer in {*task.buffers} - self._made:
            target, tile = self._bytes(buffer, self._image), self._tile_of(buffer)
            times = -(-len(target) // tile.nbytes)
            target.copy_(tile.view(torch.uint8).repeat(times)[: len(target)])
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
        given = {
            b: self._bytes(b, self._image).to(self._device, copy=True)
            for b in {*self._task.buffers} - self._made
        }

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
        self._arena = self._image.to(self._device, copy=True)
        self._tensors, self._looks = {}, {}
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
        found = (*results, *(self._bytes(b, self._arena) for b in self._changed))
        for one, other in zip(found, wanted, strict=bool(wanted)):
            if not same(_on_host(one), other):
                return OTHER_RESULTS
        for result in self._task.results:
            if result is not None and self._buffer(result) in self._made:
                self._view(result, self._image).copy_(self._tensors[result])
        for buffer in self._changed:
            self._bytes(buffer, self._image).copy_(self._bytes(buffer, self._arena))
        after = self._arena.cpu()
        if torch.equal(after.view(torch.int64), self._image.view(torch.int64)):
            return None
        for buffer in self._offsets:
            if not torch.equal(self._bytes(buffer, after), self._bytes(buffer, self._image)):
                is_made = buffer in self._made
                return "writes beyond its results" if is_made else "changes what it only reads"
        return "writes beyond its tensors"

    def _seed(self) -> None:
        """Let a random op draw the same numbers each time; it takes a while."""
        if is_random(self._task):
            torch.manual_seed(0)

    def _is_kept(self, result: int | None) -> bool:
        return (
            result is not None and result not in self._unused and self._buffer(result) in self._made
        )

    def _bytes(self, buffer: int, arena: torch.Tensor) -> torch.Tensor:
        offset = self._offsets[buffer]
        return arena[offset : offset + self._nbytes[buffer]]

    def _view(self, tensor: int, arena: torch.Tensor) -> torch.Tensor:
        return view_of(arena, self._graph.tensors[tensor], self._offsets[self._buffer(tensor)])

    def _buffer(self, tensor: int) -> int:
        return self._graph.tensors[tensor].buffer

    def _tensor(self, index: int) -> torch.Tensor:
        if index not in self._tensors:
            found = self._view(index, self._arena)
            self._tensors[index], self._looks[index] = found, _look(found)
        return self._tensors[index]

    def _tile_of(self, buffer: int) -> torch.Tensor:
        """Return numbers to fill a buffer with, over and over."""
        views = [self._graph.tensors[t] for t in tensor_ids(self._task)]
        dtypes = {v.dtype for v in views if v.buffer == buffer}
        dtype: torch.dtype = getattr(torch, dtypes.pop()) if len(dtypes) == 1 else torch.uint8
        if dtype.is_floating_point or dtype.is_complex:
            return _random_tile(dtype, self._task.buffers.index(buffer))
        groups = groups_of(self._task)
        if groups is not None and self._buffer(groups.ends) == buffer:
            return self._ends_of(groups, dtype)
        return torch.full((GUARD_BYTES,), int(dtype is torch.bool), dtype=dtype)

    def _ends_of(self, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
        """Return the ends of groups of rows."""
        num_rows = self._graph.tensors[groups.rows].shape[0]
        if self._task.op != PACKED_GROUPED:
            return torch.full((GUARD_BYTES,), num_rows, dtype=dtype)
        num_groups = self._graph.tensors[groups.ends].shape[0]
        ends = [num_rows * (group + 1) // num_groups for group in range(num_groups)]
        return torch.tensor(ends, dtype=dtype)


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
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
