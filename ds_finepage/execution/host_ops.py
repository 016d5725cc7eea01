"""Two ops that copy between host memory and the device.

A KV cache in host memory calls them in its forward. In eager PyTorch they copy. Capture knows them:
the result of ``to_device`` is a buffer that the plan reloads like a weight, and the result of
``to_host`` is an output in host memory.
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
    """Allocate host memory; if unpinned, outside of torch, so that no CPU meter counts it."""
    with torch.inference_mode(False):
        if pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return torch.frombuffer(bytearray(max(1, nbytes)), dtype=torch.uint8)[:nbytes]
