"""Two ops that say where bytes are: in host memory, or on the device.

A cache in host memory calls them in its forward. In eager PyTorch they copy. Capture knows them:
what ``to_device`` returns is a buffer that the plan brings in like a weight, and what ``to_host``
returns is handed to the caller in host memory.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("finepage::to_device", mutates_args=())
def to_device(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``rows`` on the device of ``like``, contiguous and of the same shape."""
    return rows.to(like.device, copy=True, memory_format=torch.contiguous_format)


@to_device.register_fake
def _(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape, device=like.device)


@torch.library.custom_op("finepage::to_host", mutates_args=())
def to_host(rows: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``rows`` in host memory, contiguous and of the same shape."""
    return rows.to("cpu", copy=True, memory_format=torch.contiguous_format)


@to_host.register_fake
def _(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape, device="cpu")


def host_bytes(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Make host memory; where the device is the CPU, not by torch, which would count it there."""
    with torch.inference_mode(False):
        if pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(bytearray(max(1, nbytes)), dtype=torch.uint8)[:nbytes]
