"""The router's choice, read once a pass, and reloads of the experts that it names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise

import torch

from ds_finepage.execution.reload_sources import copy_master
from ds_finepage.graph.routes import Route


class RouteRead:
    """Reads a router's choice from the device, once a pass.

    On an accelerator the host waits here, because it must know the choice before it can issue a
    copy, or which rows each expert has. A second read, for another weight of the layer, would be
    behind the copies of the first. The planner weighs the wait against the bytes that it saves.
    """

    def __init__(self, tensor: Callable[[], torch.Tensor]) -> None:
        """Bind a read; ``tensor`` returns the tensor of this call that names the slices."""
        self._tensor = tensor
        self._values: list[int] | None = None

    def values(self) -> list[int]:
        """List the numbers in the tensor."""
        if self._values is None:
            self._values = self._tensor().flatten().tolist()
        return self._values

    def forget(self) -> None:
        """Forget the choice of the last pass."""
        self._values = None


class RoutedReload:
    """An action of the h2d lane that reads which slices are used, and copies them.

    Attributes:
        skipped_bytes: The bytes that the last call did not copy.
    """

    def __init__(
        self,
        route: Route,
        on_device: torch.Tensor,
        on_host: torch.Tensor,
        read: RouteRead,
    ) -> None:
        """Bind a reload.

        Both are 1-d uint8 of the same length; or the master is 2-d, one row a slice, with gaps.
        """
        self._route = route
        self._on_device = on_device.view(route.num_slices, -1)
        self._on_host = on_host.view(self._on_device.shape)
        self._read = read
        self.skipped_bytes = 0

    def __call__(self) -> None:
        """Copy the used slices, each run of adjacent ones at once where the master has no gaps."""
        values, num_slices = self._read.values(), self._route.num_slices
        if self._route.is_ends:
            used = [g for g, (begin, end) in enumerate(pairwise([0, *values])) if end > begin]
        else:
            used = sorted({number % num_slices for number in values})
        for begin, end in _runs(used):
            copy_master(self._on_device[begin:end], self._on_host[begin:end])
        self.skipped_bytes = (num_slices - len(used)) * self._on_device.shape[1]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ``[begin, end)`` for each run of consecutive numbers among ascending ones."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        yield found[0], found[-1] + 1
