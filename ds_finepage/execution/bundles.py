"""Bundles: transfers that follow one another and are one copy.

Small transfers cost a device, and the host that enqueues them, more by their number than by their
bytes. Where the plan puts two of them side by side in the arena, and their bytes lie in the same
way in host memory, one copy does for both. Masters of small weights lie side by side for that
(``masters.py``). ``program.py`` decides which of the possible bundles keep the order of the pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ds_finepage.execution.arena import Arena
from ds_finepage.graph.memgraph import Extent, Lane

MOST_BUNDLE_BYTES = 256 << 10
"""Of a bundle: the task that waits for its first part waits for all of it."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer between host memory and an extent.

    Attributes:
        node: Its node.
        lane: Where it runs.
        extent: The extent; a part of it may be beyond the bytes.
        on_host: The bytes in host memory, 1-d uint8.
    """

    node: int
    lane: Lane
    extent: Extent
    on_host: torch.Tensor

    def is_before(self, other: Transfer) -> bool:
        """Tell whether the other transfer continues this one, on both sides."""
        ours, theirs = self.on_host, other.on_host
        return (
            self.lane is other.lane
            and self.extent.end == other.extent.offset
            and theirs.data_ptr() - ours.data_ptr() == self.extent.nbytes
            and theirs.untyped_storage().data_ptr() == ours.untyped_storage().data_ptr()
        )


class Bundles:
    """Finds transfers that may be one copy, and gives the two ends of those that are."""

    def __init__(self, arena: Arena) -> None:
        """Start without transfers; ``arena`` has their extents."""
        self._arena = arena
        self._transfers: dict[int, Transfer] = {}

    def add(self, transfer: Transfer) -> None:
        """Take a transfer of a steady pass; they come in the order of their nodes."""
        self._transfers[transfer.node] = transfer

    @property
    def next_of(self) -> dict[int, int]:
        """Node -> the node whose transfer may be one copy with its own."""
        last: dict[Lane, tuple[Transfer, int]] = {}  # and the bytes of the bundle that it ends
        found: dict[int, int] = {}
        for transfer in self._transfers.values():
            nbytes = transfer.extent.nbytes
            if transfer.lane in last:
                before, bundle_bytes = last[transfer.lane]
                if before.is_before(transfer) and bundle_bytes + nbytes <= MOST_BUNDLE_BYTES:
                    found[before.node] = transfer.node
                    nbytes += bundle_bytes
            last[transfer.lane] = (transfer, nbytes)
        return found

    def ends_of(self, nodes: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor, Extent]:
        """Return the bytes of a bundle on the device and on the host, and its extents as one.

        Args:
            nodes: The nodes, in their order.

        Returns:
            Both tensors are 1-d uint8 of the same length.
        """
        found = [self._transfers[node] for node in nodes]
        first, last = found[0], found[-1]
        nbytes = last.extent.offset + last.on_host.numel() - first.extent.offset
        whole = Extent(first.extent.offset, last.extent.end - first.extent.offset)
        with torch.inference_mode(False), torch.no_grad():
            on_host = first.on_host.as_strided((nbytes,), (1,), first.on_host.storage_offset())
        return self._arena.slice(whole, nbytes), on_host, whole
