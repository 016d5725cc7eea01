"""Tensors whose bytes are their own."""

from __future__ import annotations

import torch

from ds_finepage.errors import CaptureError


def require_plain(tensor: torch.Tensor) -> None:
    """Refuse a tensor that only wraps others, as quantized ones do: there is no storage to place.

    Raises:
        CaptureError: It is such a tensor.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        raise CaptureError(
            f"a tensor of type {type(tensor).__name__} wraps other tensors, and has no bytes of "
            f"its own that could be planned"
        )
