"""What the link to the device does: the probe's figures, and the rate of copies by size.

python benchmarks/day_link.py --device cuda
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from day_common import device_of, parser_of, reason_of, report, seconds_of

from ds_finepage.execution.probe import probe

MIB = 1 << 20
SIZES = tuple(4096 << 2 * n for n in range(9))  # 4 KiB to 256 MiB
TINY_SIZES = SIZES[:4]


def rates(device: torch.device, nbytes: int) -> None:
    """Report the rates of copies of one size, from pinned and from pageable memory."""
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    cells: dict[str, Any] = {"size_bytes": nbytes}
    try:
        for pinned in (False, True) if device.type != "cpu" else (False,):
            host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
            name = "pinned" if pinned else "pageable"
            cells[f"{name}_h2d_gb_per_s"] = rate(device, on_device, host)
            cells[f"{name}_d2h_gb_per_s"] = rate(device, host, on_device)
        if device.type != "cpu":
            cells["both_ways_gb_per_s"] = both_ways(device, on_device, host)
    except Exception as error:
        cells["remark"] = reason_of(error)
    report("link", **cells)


def rate(device: torch.device, target: torch.Tensor, source: torch.Tensor) -> float:
    """Return the rate of a copy in 10**9 bytes a second, the median of a few."""
    in_a_row = max(1, min(64, 16 * MIB // source.numel()))

    def copies() -> None:
        for _ in range(in_a_row):
            target.copy_(source, non_blocking=True)

    seconds = statistics.median(seconds_of(copies, device))
    return in_a_row * source.numel() / seconds / 1e9


def both_ways(device: torch.device, on_device: torch.Tensor, host: torch.Tensor) -> float:
    """Return the rate of two pinned copies at once, one each way, on a stream each."""
    streams = torch.Stream(device), torch.Stream(device)
    other, other_host = torch.empty_like(on_device), torch.empty_like(host, pin_memory=True)

    def copies() -> None:
        with streams[0]:
            on_device.copy_(host, non_blocking=True)
        with streams[1]:
            other_host.copy_(other, non_blocking=True)

    return 2 * host.numel() / statistics.median(seconds_of(copies, device)) / 1e9


def main() -> None:
    """Report the probe, and then the rates."""
    arguments = parser_of(__doc__).parse_args()
    device = device_of(arguments)
    found = probe(device, scratch_bytes=MIB if arguments.tiny else 256 * MIB)
    for what in ("h2d_bytes_per_s", "d2h_bytes_per_s", "memory_bytes_per_s"):
        name = what.removesuffix("_bytes_per_s") + "_gb_per_s"
        report("probe", what=name, found=getattr(found, what) / 1e9)
    for what in ("launch_ns", "transfer_latency_ns", "host_op_ns", "host_copy_ns"):
        report("probe", what=what, found=getattr(found, what))
    for dtype, flops in found.flops_per_s.items():
        report("probe", what=f"{dtype}_tflop_per_s", found=flops / 1e12)
    for nbytes in TINY_SIZES if arguments.tiny else SIZES:
        rates(device, nbytes)


if __name__ == "__main__":
    main()
