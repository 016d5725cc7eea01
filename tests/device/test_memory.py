"""Memory of the test device: forbidden to the host, limited, counted, reused in stream order."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys

import pytest
import torch

from tests.device import card

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_of_other_tests_is_freed_meanwhile() -> None:
    """Collect garbage first: a cycle with tensors would change the statistics when it goes."""
    gc.collect()


def test_the_host_cannot_touch_device_memory(device: torch.device) -> None:
    program = """
import ctypes, torch
from tests.device.loading import load
tensor = torch.ones(4, device=load())
torch.accelerator.synchronize()
print("before", flush=True)
ctypes.string_at(tensor.data_ptr(), 4)
print("after")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGSEGV, ended.stderr
    assert ended.stdout.split() == ["before"]


def test_statistics_follow_allocations(device: torch.device) -> None:
    accelerator = torch.accelerator
    accelerator.empty_cache()
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    tensor = torch.empty(3000, dtype=torch.uint8, device=device)
    assert accelerator.memory_allocated() - before == 3072  # whole grains of 512
    del tensor
    assert accelerator.memory_allocated() == before
    assert accelerator.max_memory_allocated() - before == 3072
    assert accelerator.memory_reserved() >= before + 3072
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() == before
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == accelerator.memory_allocated()


def test_capacity_is_kept(device: torch.device) -> None:
    torch.accelerator.empty_cache()
    card.set_capacity(torch.accelerator.memory_reserved() + 2 * MIB)
    free, total = torch.accelerator.get_memory_info()
    assert (free, total) == (2 * MIB, torch.accelerator.memory_reserved() + 2 * MIB)
    assert card.mem_get_info() == (free, total)
    first = torch.empty(MIB, dtype=torch.uint8, device=device)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1048577 bytes"):
        torch.empty(MIB + 1, dtype=torch.uint8, device=device)
    del first
    # The freed megabyte is in the cache; it is given back to make room.
    second = torch.empty(2 * MIB, dtype=torch.uint8, device=device)
    assert torch.accelerator.get_memory_info()[0] == 0
    del second


def test_freed_memory_is_reused_at_once_by_its_stream(device: torch.device) -> None:
    first = torch.empty(5000, device=device)
    address = first.data_ptr()
    del first
    assert torch.empty(5000, device=device).data_ptr() == address


def test_pinned_memory_is_reused_after_the_copy(device: torch.device) -> None:
    target = torch.zeros(5000, device=device)
    source = torch.ones(5000).pin_memory()
    address = source.data_ptr()
    with card.held():
        target.copy_(source, non_blocking=True)
        del source
        other = torch.full((5000,), 2.0).pin_memory()
        assert other.data_ptr() != address
    assert target.sum().item() == 5000
    assert torch.empty(5000, pin_memory=True).data_ptr() == address


def test_pinned_memory_is_known(device: torch.device) -> None:
    pinned = torch.empty(100, pin_memory=True)
    assert pinned.is_pinned() and pinned[3:].is_pinned()
    assert torch.zeros(3).pin_memory().is_pinned()
    plain = torch.zeros(100)
    assert not plain.is_pinned()
    card.cudart().cudaHostRegister(plain.data_ptr(), 400, 0)
    assert plain.is_pinned()
    assert card.cudart().cudaHostUnregister(plain.data_ptr()) == 0
    assert not plain.is_pinned()
    assert card.cudart().cudaHostUnregister(plain.data_ptr()) == 1
