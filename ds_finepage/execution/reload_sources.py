"""The host memory that reloads read: masters, rows of embedding tables, a call's host tensors.

A reload of experts copies those that the router has chosen. It reads the choice once a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch

from ds_finepage.errors import StoreError
from ds_finepage.execution.arena import byte_view
from ds_finepage.execution.host_ops import host_bytes
from ds_finepage.execution.lanes import Action
from ds_finepage.graph.routes import Route
from ds_finepage.graph.taskgraph import Buffer, TaskGraph


def copy_master(target: torch.Tensor, master: torch.Tensor) -> None:
    """Copy bytes of a host master into an extent.

    Args:
        target: Contiguous uint8.
        master: As many bytes. If its rows have gaps between them, each row is a copy: torch would
            bring all together in host memory first.
    """
    target = target.view(master.shape)
    if master.is_contiguous():
        target.copy_(master, non_blocking=True)
        return
    for row, source in zip(target, master, strict=True):
        row.copy_(source, non_blocking=True)


class ReloadSources:
    """Finds the source of each reload when the plan is bound, and fills it before each pass."""

    def __init__(
        self,
        graph: TaskGraph,
        masters: Mapping[str, torch.Tensor],
        *,
        pinned: bool,
        held: Mapping[str, torch.Tensor],
    ) -> None:
        self._graph, self._masters, self._pinned = graph, masters, pinned
        self._held = held
        self._positions = {i.tensor: i.position for i in graph.inputs}
        # Buffer -> (table, rows of this call), both of shape (rows, bytes of a row).
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._host_tensors: dict[int, list[torch.Tensor]] = {}  # tensor -> its bytes in this call
        self._in_place: Mapping[int, int] = {}

    def of_weight(self, buffer: Buffer) -> torch.Tensor:
        """Return the bytes of a weight, of a slice of it, or of its rows, as 1-d uint8.

        A weight that lies in parts on several ranks gives the bytes of this rank's part. A slice of
        a weight of experts is 2-d: it has the bytes of each matrix in a row.

        Raises:
            StoreError: The master is missing, or smaller than the captured weight.
        """
        master = self._masters.get(buffer.name)
        if master is None:
            raise StoreError(f"no host master for weight {buffer.name!r}")
        if buffer.key in self._held:
            return self._held[buffer.key]
        if buffer.gather is not None:
            return self._rows_of(buffer, buffer.gather, master)
        num_parts = self._graph.num_parts(buffer)
        if num_parts > 1:
            if master.numel() * num_parts != buffer.nbytes:
                raise StoreError(
                    f"{num_parts} parts of {buffer.name!r} have {master.numel()} bytes each; the "
                    f"plan has {buffer.nbytes} bytes for them"
                )
            return master
        num = self._graph.num_pieces(buffer)
        experts = self._graph.experts_by_name[buffer.name] if num > 1 else None
        end = buffer.offset + buffer.nbytes if experts is None else experts.nbytes
        if master.numel() < end:
            raise StoreError(
                f"the host master of {buffer.name!r} has {master.numel()} bytes; captured were "
                f"bytes up to {end}"
            )
        if experts is None:
            return master[buffer.offset : end]
        first = buffer.offset // num
        return master[:end].view(num, -1)[:, first : first + buffer.nbytes // num]

    def reload_of_rows(self, rows: Buffer, on_device: torch.Tensor, *, is_entry: bool) -> Action:
        """Bind a reload of an argument in host memory, which may be smaller than planned.

        Args:
            rows: The buffer.
            on_device: The bytes of its extent.
            is_entry: Those that :meth:`fill` gets as in place are left out.
        """
        assert rows.gather is not None
        source = self._host_tensors.setdefault(rows.gather, [])

        def reload() -> None:
            (on_host,) = source
            begin = self._in_place.get(rows.id, 0) if is_entry else 0
            copy_master(on_device[begin : on_host.numel()], on_host[begin:])

        return reload

    def _rows_of(self, buffer: Buffer, indices: int, master: torch.Tensor) -> torch.Tensor:
        if buffer.id not in self._rows:
            row_bytes = buffer.nbytes // math.prod(self._graph.tensors[indices].shape)
            rows = host_bytes(buffer.nbytes, pinned=self._pinned)
            self._rows[buffer.id] = (master.view(-1, row_bytes), rows.view(-1, row_bytes))
        return self._rows[buffer.id][1].view(-1)

    def fill(self, args: Sequence[Any], in_place: Mapping[int, int]) -> None:
        """Take the sources of one pass.

        Args:
            args: The call's arguments.
            in_place: Rows of a KV cache -> how many of their first bytes are in the extent in which
                the plan keeps them.
        """
        self._in_place = in_place
        if self._rows:
            self.gather_rows(args)
        for tensor, source in self._host_tensors.items():
            source[:] = [byte_view(args[self._positions[tensor]])]

    def gather_rows(self, args: Sequence[Any]) -> None:
        """Copy the rows that the call's indices name.

        The indices must be in host memory: on an accelerator the host waits for them here,
        between two passes. The last pass has read its rows by then, because the caller's stream
        follows it.
        """
        for buffer, (table, rows) in self._rows.items():
            tensor = self._graph.buffers[buffer].gather
            assert tensor is not None
            indices: torch.Tensor = args[self._positions[tensor]].cpu()
            planned = self._graph.tensors[tensor].shape
            if indices.shape == planned:
                torch.index_select(table, 0, indices.reshape(-1), out=rows)
            else:  # a shorter call: each row goes where the planned call has it
                picked = table.index_select(0, indices.reshape(-1))
                target = rows.view(*planned, -1)[tuple(slice(n) for n in indices.shape)]
                target.copy_(picked.view(*indices.shape, -1))

    def clear(self) -> None:
        """Drop the references to the call's tensors."""
        for source in self._host_tensors.values():
            source.clear()


ReadSlices = Callable[[int, int, torch.Tensor], None]
"""Reads slices of a weight, from one to another, from a file into a tensor of the device."""


class RoutedReload:
    """An action that reads which slices are used, and copies them.

    Attributes:
        skipped_bytes: The bytes that the last call did not copy.
    """

    def __init__(
        self,
        route: Route,
        on_device: torch.Tensor,
        source: torch.Tensor | ReadSlices,
        read: Callable[[], list[int]],
    ) -> None:
        """Bind a reload; ``read`` returns the numbers of the tensor that names the slices.

        Both are 1-d uint8 of the same length; or the master is 2-d, one row a slice, with gaps; or
        the source reads a file.
        """
        self._route = route
        self._on_device = on_device.view(route.num_slices, -1)
        if isinstance(source, torch.Tensor):
            source = source.view(self._on_device.shape)
        self._source = source
        self._read = read
        self.skipped_bytes = 0

    def __call__(self) -> None:
        """Copy the used slices, each run of adjacent ones at once where the master has no gaps."""
        values, num_slices = self._read(), self._route.num_slices
        if self._route.is_ends:
            used = [g for g, (begin, end) in enumerate(pairwise([0, *values])) if end > begin]
        else:
            used = sorted({number % num_slices for number in values})
        for begin, end in _runs(used):
            target = self._on_device[begin:end]
            if isinstance(self._source, torch.Tensor):
                copy_master(target, self._source[begin:end])
            else:
                self._source(begin, end, target)
        self.skipped_bytes = (num_slices - len(used)) * self._on_device.shape[1]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ``[begin, end)`` for each run of consecutive numbers among ascending ones."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        yield found[0], found[-1] + 1
