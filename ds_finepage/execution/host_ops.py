"""Two ops that copy between host memory and the device.

A KV cache in host memory calls them in its forward. Rows lie there with tokens as the first
dimension, so the live rows are a prefix. In eager PyTorch the ops copy. Capture knows them:
the result of ``to_device`` is a buffer that the plan keeps or reloads like a weight, and the result
of ``to_host`` is an output in host memory.
"""

from __future__ import annotations

import torch

from ds_finepage.execution.device import Accelerator

TOKENS_FIRST = (2, 0, 1, 3)
"""Permutes (batch, heads, tokens, width) to the order of rows in host memory."""

HEADS_SECOND = (1, 2, 0, 3)
"""Permutes the order of rows in host memory back."""


@torch.library.custom_op("finepage::to_device", mutates_args=())
def to_device(rows: torch.Tensor, new: torch.Tensor, capacity: int) -> torch.Tensor:
    """Return a copy of ``rows`` on the device of ``new``, with room behind them.

    The caller writes the new rows there in the same forward. The plan may keep the result for the
    next call, in which these rows are among ``rows``.

    Args:
        rows: Of shape (tokens, batch, heads, width).
        new: Of shape (batch, heads, new tokens, width).
        capacity: The tokens of the result.
    """
    found = _with_room(rows, new, capacity)
    found[: len(rows)].copy_(rows)
    return found


@to_device.register_fake
def _(rows: torch.Tensor, new: torch.Tensor, capacity: int) -> torch.Tensor:
    return _with_room(rows, new, capacity)


def _with_room(rows: torch.Tensor, new: torch.Tensor, capacity: int) -> torch.Tensor:
    return rows.new_empty((capacity, *rows.shape[1:]), device=new.device)


@torch.library.custom_op("finepage::to_host", mutates_args=())
def to_host(rows: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``rows`` in host memory, contiguous and of the same shape."""
    return rows.to("cpu", copy=True, memory_format=torch.contiguous_format)


@to_host.register_fake
def _(rows: torch.Tensor) -> torch.Tensor:
    return rows.new_empty(rows.shape, device="cpu")


def append(
    rows: torch.Tensor | None, new: torch.Tensor, *, num_live: int, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put new rows behind those in host memory.

    Args:
        rows: The live rows in host memory, of shape (tokens, batch, heads, width); None for none.
        new: Rows on the device, of shape (batch, heads, new tokens, width).
        num_live: The live tokens.
        capacity: The tokens that have room on the device.

    Returns:
        All rows on the device, in the order of ``new``; the new ones in host memory.
    """
    found = new
    if rows is not None:
        num_new = new.shape[2]
        if capacity < num_live + num_new:  # more rows came than the call told
            capacity = num_live + num_new
        on_device: torch.Tensor = to_device(rows, new, capacity)
        on_device.narrow(0, num_live, num_new).copy_(new.permute(TOKENS_FIRST))
        found = on_device.narrow(0, 0, num_live + num_new).permute(HEADS_SECOND)
    return found, to_host(new.permute(TOKENS_FIRST))


def identify(rows: torch.Tensor, identity: object) -> None:
    """Tell whose rows a tensor in host memory has; what follows them later has the same identity.

    The arena may keep a copy of rows from call to call. It is valid for that identity alone.
    """
    rows.__dict__["finepage_identity"] = identity


def identity_of(rows: torch.Tensor) -> object:
    """Return whose rows a tensor has; something new where that is not known."""
    return rows.__dict__.get("finepage_identity") or object()


def host_bytes(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Allocate host memory; if unpinned, outside of torch, so that no CPU meter counts it."""
    with torch.inference_mode(False):
        if pinned:
            where = torch.accelerator.current_accelerator()
            assert where is not None
            return Accelerator(where).new_pinned(nbytes)
        return torch.frombuffer(bytearray(max(1, nbytes)), dtype=torch.uint8)[:nbytes]
