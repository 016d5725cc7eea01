"""Measures the rates of the machine at hand."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ds_finepage.errors import ConfigError
from ds_finepage.execution.device import device_of
from ds_finepage.execution.disk import FileReader, range_of
from ds_finepage.execution.host_ops import host_bytes
from ds_finepage.graph.hardware import HardwareProfile

MIB = 1 << 20
IN_A_ROW = 64
"""Small ops and copies in one measurement, so that they wait for each other as in a pass."""

NUM_COPIES = 16
"""The fastest of so many copies counts. On a busy CPU the first ten may wait for a thread."""

HOST_BYTES, HOST_WIDTH, HOST_ROWS = 128 * MIB, 4096, 16
"""The host multiplies by a matrix of so many bytes, which few caches hold, and of such a width; by
one row and by so many."""

HOST_COPIES = 4
"""Copies that the link makes meanwhile."""

DISK_BYTES = 256 * MIB
"""Bytes that are read from a file, at most."""

ORDINARY = 0x3C
"""Numbers made of this byte are ordinary ones in each dtype."""

LONG_ENOUGH_S = 0.004
"""A product that takes as long shows the rate of the device."""


def probe(device: torch.device, *, scratch_bytes: int = 32 * MIB) -> HardwareProfile:
    """Measure copy, memory and matrix-product rates with at most ``scratch_bytes`` on the device.

    Small scratch makes for rough figures; the largest of a few repeats counts.
    """
    half = max(4096, scratch_bytes // 2)
    known = device_of(device)
    with torch.inference_mode(False), torch.no_grad():
        one, host = torch.empty(1, device=device), known.pinned(torch.empty(1))
        op, copy = partial(one.add_, 1), partial(one.copy_, host, non_blocking=True)
        launch = seconds_of(op, device, in_a_row=IN_A_ROW)
        latency = seconds_of(copy, device, in_a_row=IN_A_ROW)
        # On the CPU the host runs an op itself, so the op's own time has the host's in it.
        host_op, host_copy = (
            seconds_of(run, device, in_a_row=IN_A_ROW, is_issued=True)
            if known.is_accelerator
            else 0.0
            for run in (op, copy)
        )
        links = _links(half, device, latency)
        memory = _memory_rate(half, device)
        flops = {
            name: _matmul_rate(getattr(torch, name), device, half) for name in known.rated_dtypes
        }
    return HardwareProfile(
        name=known.name,
        source=f"measured with {scratch_bytes} bytes of scratch",
        capacity_bytes=known.memory_info()[1],
        memory_bytes_per_s=memory,
        flops_per_s={**flops, "default": flops["float32"]},
        launch_ns=int(launch * 1e9),
        transfer_latency_ns=int(latency * 1e9),
        host_op_ns=int(host_op * 1e9),
        host_copy_ns=int(host_copy * 1e9),
        **links,
    )


def with_measured_host(
    profile: HardwareProfile, device: torch.device, *, scratch_bytes: int = 32 * MIB
) -> HardwareProfile:
    """Measure how fast the host multiplies by weights in its memory, while the link copies.

    The slowest dtype counts: some processors have no instructions for one of them.

    Args:
        profile: The machine.
        device: What the link copies to; nothing is copied to a CPU.
        scratch_bytes: Most bytes to take there.
    """
    known, rates, flops = device_of(device), list[float](), list[float]()
    with torch.inference_mode(False), torch.no_grad():
        # Outside of torch, so that no meter of a CPU takes it for memory of the device.
        block = host_bytes(HOST_BYTES, pinned=False).fill_(ORDINARY)
        result = host_bytes(HOST_BYTES // HOST_WIDTH * HOST_ROWS, pinned=False)
        pinned = known.pinned(torch.ones(scratch_bytes // 4 if known.is_accelerator else 1))
        on_device = torch.empty_like(pinned, device=device)

        def multiply(rows: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
            for _ in range(HOST_COPIES):
                on_device.copy_(pinned, non_blocking=True)
            torch.mm(rows, matrix, out=out)

        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            rows, made = block.view(dtype).view(-1, HOST_WIDTH), result.view(dtype)
            one, few = (
                seconds_of(
                    partial(multiply, rows[:n], rows.t(), made[: n * len(rows)].view(n, -1)),
                    device,
                    is_issued=True,
                )
                for n in (1, HOST_ROWS)
            )
            rates.append(HOST_BYTES / one)
            flops.append(2 * HOST_ROWS * rows.numel() / few)
    return replace(profile, host_bytes_per_s=min(rates), host_flops_per_s=min(flops))


def with_measured_disk(
    profile: HardwareProfile, device: torch.device, path: Path
) -> HardwareProfile:
    """Measure how fast a file comes to the device, read as plans read: past the page cache.

    Args:
        profile: The machine.
        device: Where the bytes go.
        path: The file; its first ``DISK_BYTES`` are read, or all of it.

    Raises:
        ConfigError: There is no such file, or it is empty.
        StoreError: It cannot be read.
    """
    nbytes = min(DISK_BYTES, path.stat().st_size) if path.is_file() else 0
    source = range_of(str(path), 0, nbytes)
    if source is None or not nbytes:
        raise ConfigError(f"--disk: {path} is no file with bytes in it. Name one of a checkpoint.")
    reader, target = FileReader(device), torch.ones(nbytes, dtype=torch.uint8, device=device)
    try:
        reader.copy(source.part(0, 1), target[:1])  # takes the memory, and starts the threads
        with path.open("rb") as file:  # its file system may have no direct reads
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        reader.copy(source, target)
        return replace(profile, disk_bytes_per_s=nbytes / (time.perf_counter() - start))
    finally:
        reader.close()


def _links(nbytes: int, device: torch.device, latency: float) -> dict[str, Any]:
    """Measure the rates of the links, net of the latency of a copy in seconds."""
    host = device_of(device).pinned(torch.ones(nbytes, dtype=torch.uint8))
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    to_device = partial(on_device.copy_, host, non_blocking=True)
    to_host = partial(host.copy_, on_device, non_blocking=True)
    reload, offload = (seconds_of(run, device, repeats=NUM_COPIES) for run in (to_device, to_host))
    return {
        "h2d_bytes_per_s": nbytes / max(reload - latency, reload / 2),
        "d2h_bytes_per_s": nbytes / max(offload - latency, offload / 2),
    }


def _memory_rate(nbytes: int, device: torch.device) -> float:
    source, target = (torch.empty(nbytes // 2, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source), device)


def context_margin_bytes(device: torch.device) -> int:
    """Measure what the libraries take on first use: the drop in free memory by one product.

    That is the margin to leave beside a budget of "all that is free". On CPU it is the growth of
    the process while it multiplies, which other processes on the machine blur.
    """
    before, _ = device_of(device).memory_info()
    with torch.inference_mode(False), torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16):
            a = torch.ones(64, 64, dtype=dtype, device=device)
            (a @ a).sum().item()
    return max(0, before - device_of(device).memory_info()[0])


def _matmul_rate(dtype: torch.dtype, device: torch.device, scratch: int) -> float:
    """Measure products that grow until one takes long enough, or has no room.

    Large products reach the rate of a fast device. A processor without instructions for a dtype is
    a hundred times slower, and shows its rate with small ones.
    """
    n, most = 64, 2048 if device_of(device).is_accelerator else 512
    while True:
        a = torch.ones(n, n, dtype=dtype, device=device)
        out = torch.empty_like(a)
        seconds = seconds_of(partial(torch.mm, a, a, out=out), device)
        has_room = 3 * (2 * n) ** 2 * dtype.itemsize <= scratch and 2 * n <= most
        if seconds >= LONG_ENOUGH_S or not has_room:
            return 2 * n**3 / seconds
        n *= 2


def seconds_of(
    run: Callable[[], object],
    device: torch.device,
    *,
    repeats: int = 4,
    in_a_row: int = 1,
    is_issued: bool = False,
) -> float:
    """Measure how long a run takes.

    The shortest of the repeats counts. If it ``is_issued``, the time ends when the host has issued
    the work, not when the device has done it.
    """
    best, known = float("inf"), device_of(device)
    for _ in range(repeats):
        known.synchronize()
        start = time.perf_counter()
        for _ in range(in_a_row):
            run()
        if not is_issued:
            known.synchronize()
        best = min(best, time.perf_counter() - start)
    return max(best / in_a_row, 1e-9)
