"""Meters of live device bytes that know nothing of plans (floor 2).

On CPU the meter listens to the allocator's own events through torch's profiler: everything that is
allocated through torch while it is on counts, whoever asked for it. On CUDA it reads the caching
allocator's statistics.
"""

from __future__ import annotations

from types import TracebackType

import torch
from torch.autograd.profiler import profile

from ds_finepage.execution.measure import allocation_events


class DeviceMeter:
    """A context that measures the peak of live bytes, beyond those at its start.

    Start it before the model is attached, so that the arena is counted; host memory that is
    allocated meanwhile through torch (masters, the pinned pool) counts on CPU too, so let it be
    there before.
    """

    def __init__(self, device: torch.device) -> None:
        """Measure ``device``."""
        self._device = device
        self._profiler: profile | None = None
        self._at_start = 0
        self.peak_bytes = 0

    def __enter__(self) -> DeviceMeter:
        """Begin to measure."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._at_start = torch.cuda.memory_allocated(self._device)
        else:
            self._profiler = profile(use_kineto=False, profile_memory=True)
            self._profiler.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop; :attr:`peak_bytes` holds the result."""
        if self._profiler is None:
            torch.cuda.synchronize(self._device)
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device) - self._at_start
            return
        self._profiler.__exit__(kind, error, trace)
        live = 0
        for _, nbytes in allocation_events(self._profiler):
            live += nbytes
            self.peak_bytes = max(self.peak_bytes, live)
        self._profiler = None
