"""The host memory that reloads read: masters, rows of embedding tables, a call's host tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ds_finepage.errors import StoreError
from ds_finepage.execution.arena import byte_view
from ds_finepage.execution.host_ops import host_bytes
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
        self, graph: TaskGraph, masters: Mapping[str, torch.Tensor], *, pinned: bool
    ) -> None:
        self._graph, self._masters, self._pinned = graph, masters, pinned
        self._positions = {i.tensor: i.position for i in graph.inputs}
        # Buffer -> (table, rows of this call), both of shape (rows, bytes of a row).
        self._rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._host_tensors: dict[int, list[torch.Tensor]] = {}  # tensor -> its bytes in this call

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

    def of_host_tensor(self, tensor: int) -> list[torch.Tensor]:
        """Return a list that holds the bytes of an argument in host memory while a pass runs."""
        return self._host_tensors.setdefault(tensor, [])

    def _rows_of(self, buffer: Buffer, indices: int, master: torch.Tensor) -> torch.Tensor:
        if buffer.id not in self._rows:
            row_bytes = buffer.nbytes // math.prod(self._graph.tensors[indices].shape)
            rows = host_bytes(buffer.nbytes, pinned=self._pinned)
            self._rows[buffer.id] = (master.view(-1, row_bytes), rows.view(-1, row_bytes))
        return self._rows[buffer.id][1].view(-1)

    def fill(self, args: Sequence[Any]) -> None:
        """Take the sources of one pass from the call's arguments."""
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
