"""Host memory that the ranks of one machine share: weights that tensor parallelism leaves whole.

Each rank reads some of these weights into a file that is only in memory. The others map it, so a
page is in memory once. Every map is private: a rank that writes into a weight gets its own copy of
the pages that it writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ds_finepage.units import align_up

ALIGNMENT = 64
"""Of each weight in a file, in bytes."""

Read = Callable[[torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Whole:
    """A weight that every rank needs whole.

    Attributes:
        num_elements: Of the weight.
        dtype: Of the weight.
        read_into: Copies the weight into a flat tensor of that size and dtype.
    """

    num_elements: int
    dtype: torch.dtype
    read_into: Read

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.num_elements * self.dtype.itemsize


def node() -> str | None:
    """Return a name for the processes that can map each other's memory; None if none can."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        names = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    return f"{boot} {names} {os.getuid()}" if hasattr(os, "memfd_create") else None


def shared(
    weights: Sequence[Whole], rank: int, gather: Callable[[Any], list[Any]]
) -> list[torch.Tensor]:
    """Return flat tensors with the values of some weights; on one machine they are there once.

    Args:
        weights: The same on all ranks.
        rank: The number of this rank.
        gather: Returns what all ranks have given to it, by rank. All ranks call this function.

    Raises:
        RankError: Another rank cannot read its weights.
        StoreError: A file of the checkpoint has changed.
    """
    nodes = gather(node())
    near = [each for each, name in enumerate(nodes) if name and name == nodes[rank]]
    if len(near) < 2:
        found = [_read(weight) for weight in weights]
        gather(None)
        gather(None)
        return found
    places, sizes = _dealt(weights, len(near))
    file = os.memfd_create("ds_finepage")
    try:
        mine = near.index(rank)
        placed = zip(weights, places, strict=True)
        _fill(file, sizes[mine], [(weight, at) for weight, (owner, at) in placed if owner == mine])
        files = gather([os.getpid(), file])
        maps = [_mapped(*files[each], size=size) for each, size in zip(near, sizes, strict=True)]
        gather(None)  # the others have mapped this file
    finally:
        os.close(file)
    return [_view(maps[p[0]], weight, p[1]) for weight, p in zip(weights, places, strict=True)]


def _dealt(weights: Sequence[Whole], num_ranks: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Give each weight to the rank that has the least bytes.

    Returns:
        The rank of each weight and its offset in that rank's file, and the bytes of the files.
    """
    sizes, places = [0] * num_ranks, []
    for weight in weights:
        owner = min(range(num_ranks), key=sizes.__getitem__)
        places.append((owner, sizes[owner]))
        sizes[owner] += align_up(weight.nbytes, ALIGNMENT)
    return places, sizes


def _fill(file: int, size: int, weights: Sequence[tuple[Whole, int]]) -> None:
    os.ftruncate(file, max(size, 1))
    memory = _mapped(os.getpid(), file, size=size, is_shared=True)
    for weight, at in weights:
        weight.read_into(_view(memory, weight, at))


def _mapped(process: int, file: int, *, size: int, is_shared: bool = False) -> torch.Tensor:
    """Map a file of a process; without sharing, writes go into a copy of their pages."""
    path = f"/proc/{process}/fd/{file}"
    return torch.from_file(path, shared=is_shared, size=max(size, 1), dtype=torch.uint8)


def _view(memory: torch.Tensor, weight: Whole, at: int) -> torch.Tensor:
    return memory[at : at + weight.nbytes].view(weight.dtype)


def _read(weight: Whole) -> torch.Tensor:
    found = torch.empty(weight.num_elements, dtype=weight.dtype)
    weight.read_into(found)
    return found
