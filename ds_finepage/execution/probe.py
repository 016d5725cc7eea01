"""Measures the rates of the machine at hand."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ds_finepage.execution.device import device_of
from ds_finepage.graph.hardware import HardwareProfile

MIB = 1 << 20
IN_A_ROW = 64
"""Small ops and copies in one measurement, so that they wait for each other as in a pass."""


def probe(device: torch.device, *, scratch_bytes: int = 32 * MIB) -> HardwareProfile:
    """Measure copy, memory and matrix-product rates with at most ``scratch_bytes`` on the device.

    Small scratch makes for rough figures; the largest of a few repeats counts.
    """
    half = max(4096, scratch_bytes // 2)
    names = device_of(device).rated_dtypes
    with torch.inference_mode(False), torch.no_grad():
        h2d, d2h, memory = _copy_rates(half, device)
        flops = {name: _matmul_rate(getattr(torch, name), device, half) for name in names}
        op, copy = _small_op(device), _small_copy(device)
        launch = _seconds(op, device, in_a_row=IN_A_ROW)
        latency = _seconds(copy, device, in_a_row=IN_A_ROW)
        # On the CPU the host runs an op itself, so the op's own time has the host's in it.
        host_op, host_copy = (
            _seconds(run, device, in_a_row=IN_A_ROW, is_issued=True)
            if device_of(device).is_accelerator
            else 0.0
            for run in (op, copy)
        )
    return HardwareProfile(
        name=device_of(device).name,
        source=f"measured with {scratch_bytes} bytes of scratch",
        capacity_bytes=device_of(device).memory_info()[1],
        h2d_bytes_per_s=h2d,
        d2h_bytes_per_s=d2h,
        memory_bytes_per_s=memory,
        flops_per_s={**flops, "default": flops["float32"]},
        launch_ns=int(launch * 1e9),
        transfer_latency_ns=int(latency * 1e9),
        host_op_ns=int(host_op * 1e9),
        host_copy_ns=int(host_copy * 1e9),
    )


def _small_op(device: torch.device) -> Callable[[], object]:
    one = torch.empty(1, device=device)
    return lambda: one.add_(1)


def _small_copy(device: torch.device) -> Callable[[], object]:
    host = device_of(device).pinned(torch.empty(1))
    on_device = torch.empty(1, device=device)
    return lambda: on_device.copy_(host, non_blocking=True)


def _copy_rates(nbytes: int, device: torch.device) -> tuple[float, float, float]:
    """Return host-to-device, device-to-host and device memory rates in bytes a second."""
    host = device_of(device).pinned(torch.empty(nbytes, dtype=torch.uint8))
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    h2d = nbytes / _seconds(lambda: on_device.copy_(host, non_blocking=True), device)
    d2h = nbytes / _seconds(lambda: host.copy_(on_device, non_blocking=True), device)
    source, target = on_device[: nbytes // 2], on_device[nbytes // 2 : nbytes // 2 * 2]
    memory = 2 * source.numel() / _seconds(lambda: target.copy_(source), device)
    return h2d, d2h, memory


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
    n = 64
    while 3 * (2 * n) ** 2 * dtype.itemsize <= scratch and n < 2048:
        n *= 2
    if not device_of(device).is_accelerator:
        n = min(n, 512)
    a = torch.ones(n, n, dtype=dtype, device=device)
    out = torch.empty_like(a)
    return 2 * n**3 / _seconds(lambda: torch.mm(a, a, out=out), device)


def _seconds(
    run: Callable[[], object],
    device: torch.device,
    *,
    repeats: int = 4,
    in_a_row: int = 1,
    is_issued: bool = False,
) -> float:
    """Measure how long a run takes.

    Args:
        run: Issues work to the device.
        device: The device.
        repeats: Measurements; the shortest counts.
        in_a_row: Runs in one measurement.
        is_issued: Measure until the host has issued the work, not until the device has done it.
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
