"""A process group of one rank, for collectives in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import distributed


@contextmanager
def one_rank() -> Iterator[str]:
    """Make a group, if there is none; yield its name."""
    is_new = not distributed.is_initialized()
    if is_new:
        store = distributed.HashStore()
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert distributed.group.WORLD is not None
        yield distributed.group.WORLD.group_name
    finally:
        if is_new:
            distributed.destroy_process_group()
