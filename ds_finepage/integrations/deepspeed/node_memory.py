"""Host memory that the ranks of one machine share: weights that tensor parallelism leaves whole.

The ranks read these weights together into a file that is only in memory, and each maps it. So a
page is in memory once. Every map is private in the end: a rank that writes into a weight gets its
own copy of the pages that it writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from ds_finepage.units import align_up

ALIGNMENT = 64
"""Of each weight in the file, in bytes."""


def node() -> str | None:
    """Return a name for the processes that can map each other's memory; None if none can."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        names = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    return f"{boot} {names} {os.getuid()}" if hasattr(os, "memfd_create") else None


def shared(
    like: Sequence[torch.Tensor],
    read: Callable[[int, torch.Tensor], object],
    rank: int,
    gather: Callable[[Any], list[Any]],
) -> list[torch.Tensor]:
    """Return flat tensors with the values of some weights; on one machine they are there once.

    Args:
        like: Tensors of the size and dtype of each weight, the same on all ranks.
        read: Copies a weight, given its number, into a flat tensor of that size and dtype.
        rank: The number of this rank.
        gather: Returns what all ranks have given to it, by rank. All ranks call this function.

    Raises:
        RankError: Another rank cannot read its weights.
        StoreError: A file of the checkpoint has changed.
    """
    nodes = gather(node())
    near = [each for each, name in enumerate(nodes) if name and name == nodes[rank]]
    is_alone = len(near) < 2
    ends = [0, *accumulate(align_up(each.nbytes, ALIGNMENT) for each in like)]
    file = None if is_alone else os.memfd_create("ds_finepage")
    try:
        files = gather([os.getpid(), file])
        path = "" if is_alone else "/proc/{}/fd/{}".format(*files[near[0]])
        memory = torch.empty(ends[-1], dtype=torch.uint8) if is_alone else _mapped(path, ends[-1])
        for i, weight in enumerate(like):
            if is_alone or near[i % len(near)] == rank:
                read(i, _view(memory, weight, ends[i]))
        gather(None)  # all weights are read
        if not is_alone:
            memory = _mapped(path, ends[-1], is_private=True)
        gather(None)  # the others have mapped the file
    finally:
        if file is not None:
            os.close(file)
    return [_view(memory, weight, at) for weight, at in zip(like, ends, strict=False)]


def _mapped(path: str, size: int, *, is_private: bool = False) -> torch.Tensor:
    """Map a file, and make it that large; in private, writes go into a copy of their pages."""
    return torch.from_file(path, shared=not is_private, size=max(size, 1), dtype=torch.uint8)


def _view(memory: torch.Tensor, like: torch.Tensor, at: int) -> torch.Tensor:
    return memory[at : at + like.nbytes].view(like.dtype)
