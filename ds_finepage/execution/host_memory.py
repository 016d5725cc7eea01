"""Host memory: what is free, and pinned memory that takes no more than its own bytes.

torch pins through an allocator that rounds each block up to a power of two: 86 MiB take 128, and a
model of 13 GiB takes 17. So large blocks are mapped here, and registered with the driver. Pages are
shared with a process that is forked, so a fork copies none of them.
"""

from __future__ import annotations

import mmap
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch

from ds_finepage.errors import StoreError
from ds_finepage.units import align_up

CGROUPS = Path("/sys/fs/cgroup")
"""The files with the limit of a container."""

LIMITS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
"""Version 2 and 1: the files with the limit, with what is taken, and with its parts."""

LEAST_BYTES = 1 << 20
"""Smaller blocks are left to torch: to register one takes longer than to reuse one."""


def host_memory() -> tuple[int, int]:
    """Return the free bytes of host memory, and all of them: those of the container, if it has few.

    Pages of files that nothing uses any more are free.
    """
    found = psutil.virtual_memory()
    free, total = int(found.available), int(found.total)
    for limit, taken, parts in LIMITS:
        try:
            most, now = (int((CGROUPS / name).read_text()) for name in (limit, taken))
            cached = re.search(r"^inactive_file (\d+)", (CGROUPS / parts).read_text(), re.MULTILINE)
        except (OSError, ValueError):  # no such version, or no limit
            continue
        if most < total:
            free = min(free, max(0, most - now + int(cached[1] if cached else 0)))
            total = most
    return free, total


class Registration:
    """Host memory that a driver has pinned, for as long as this object lives.

    Attributes:
        total_bytes: Bytes of all registrations, in whole pages.
        memory: The memory, where it has another owner; it lives as long as this object.
    """

    total_bytes: ClassVar[int] = 0
    memory: torch.Tensor | None = None
    _process: int | None = None

    def __init__(self, runtime: Any, memory: torch.Tensor) -> None:
        """Pin memory where it is.

        Args:
            runtime: The functions of the driver, as ``torch.cuda.cudart()`` returns them.
            memory: 1-d uint8, in host memory.

        Raises:
            StoreError: The driver refuses.
        """
        self._runtime, self._address = runtime, memory.data_ptr()
        self._nbytes = align_up(memory.numel(), mmap.PAGESIZE)
        status = int(runtime.cudaHostRegister(self._address, memory.numel(), 0))
        if status:
            raise StoreError(
                f"the driver cannot pin {memory.numel()} bytes of host memory in place: error "
                f"{status} of cudaHostRegister"
            )
        self._process = os.getpid()
        Registration.total_bytes += self._nbytes

    def __del__(self) -> None:
        """Unpin the memory: not in a process that was forked, nor when the driver may be gone."""
        if self._process == os.getpid() and not sys.is_finalizing():
            with suppress(RuntimeError):
                torch.accelerator.synchronize()  # copies may be on their way
            self._runtime.cudaHostUnregister(self._address)
            Registration.total_bytes -= self._nbytes


class Pages(mmap.mmap):
    """Mapped memory. Its registration ends before it is unmapped."""

    registration: Registration


def new_pages(nbytes: int, runtime: Any) -> torch.Tensor:
    """Return pinned host memory, 1-d uint8, in pages of its own.

    Raises:
        OSError: The system has no memory left.
        StoreError: The driver refuses.
    """
    pages = Pages(-1, nbytes)
    found = torch.frombuffer(pages, dtype=torch.uint8)
    pages.registration = Registration(runtime, found)
    return found
