"""Meters of live device bytes that know nothing of plans.

On CPU the meter listens to the allocator's own events through torch's profiler: every
allocation through torch on this thread counts while it is on. On an accelerator it reads the
statistics of torch's allocator.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd.profiler import profile

from ds_finepage._compat.torch import _enable_record_function, _profiler_enabled
from ds_finepage.execution.device import Accelerator, device_of

_running: ContextVar[DeviceMeter | None] = ContextVar("finepage_meter", default=None)


def begin_in_main_thread() -> None:
    """Let torch's profiler begin here: if another thread is the first, Kineto says so on stderr."""
    if threading.current_thread() is threading.main_thread() and not _profiler_enabled():
        with _profile():
            pass


def _profile(*, profile_memory: bool = False) -> profile:
    # Kineto announces every start and stop on stderr at lower levels.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    return profile(use_kineto=False, profile_memory=profile_memory)


class DeviceMeter:
    """A context that measures the peak of live bytes, beyond those at its start.

    Start it before the model is attached, so that the arena is counted; host memory that is
    allocated meanwhile through torch (masters, the pinned pool) counts on CPU too, so let it be
    there before.

    Invariant: on CPU a block counts from the event of its allocation to that of its release; the
    release of a block that was there before the meter counts for nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._profiler: profile | None = None
        self._blocks: dict[int, int] = {}  # address -> bytes
        self._at_start = 0
        self._outer: DeviceMeter | None = None  # made room for this one
        self.live_bytes = 0
        self.peak_bytes = 0

    def __enter__(self) -> DeviceMeter:
        """Begin to measure.

        Raises:
            RuntimeError: torch's profiler is on already; it cannot be nested.
        """
        if isinstance(self._device, Accelerator):
            self._device.synchronize()
            self._at_start = self._device.live_bytes
        elif _profiler_enabled():
            raise RuntimeError("torch's profiler, or another meter, is on; end that one first")
        self._listen()
        self._outer = _running.get()
        _running.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop; :attr:`peak_bytes` holds the result."""
        _running.set(self._outer)
        self._take()

    def _listen(self) -> None:
        if isinstance(self._device, Accelerator):
            self._device.reset_peak()
            return
        self._profiler = _profile(profile_memory=True)
        self._profiler.__enter__()
        # Allocations are all that is wanted. And a region that is entered under one profile and
        # left under the next, as in free_profiler, would be written to where it no longer is.
        _enable_record_function(False)

    def _take(self) -> None:
        """Stop listening and tally the allocations."""
        if isinstance(self._device, Accelerator):
            self._device.synchronize()
            self.live_bytes = self._device.live_bytes - self._at_start
            self.peak_bytes = max(self.peak_bytes, self._device.peak_bytes - self._at_start)
            return
        assert self._profiler is not None
        profiler, self._profiler = self._profiler, None
        _enable_record_function(True)
        if not _profiler_enabled():
            raise RuntimeError("another user of torch's profiler ended this meter's")
        profiler.__exit__(None, None, None)
        for address, nbytes in _allocations(profiler):
            # An address that comes again was released while the meter was off.
            self.live_bytes -= self._blocks.pop(address, 0)
            if nbytes > 0:
                self._blocks[address] = nbytes
                self.live_bytes += nbytes
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)


@contextmanager
def free_profiler() -> Iterator[None]:
    """Leave torch's only profiler, and its peak statistics, to another user.

    A meter of this thread is blind meanwhile; what is allocated must be released again.
    """
    meter = _running.get()
    if meter is None:
        yield
        return
    meter._take()
    try:
        yield
    finally:
        meter._listen()


def _allocations(profiler: profile) -> Iterator[tuple[int, int]]:
    """Go over the allocator's events of a finished profile as (address, signed bytes)."""
    assert profiler.kineto_results is not None
    found: list[tuple[int, int, int]] = []
    left: list[Any] = list(reversed(profiler.kineto_results.experimental_event_tree()))
    while left:
        event = left.pop()
        left.extend(reversed(event.children))
        if event.name == "[memory]":
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    for _, address, nbytes in sorted(found, key=lambda event: event[0]):
        yield address, nbytes
