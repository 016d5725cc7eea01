"""The arena and the pinned pool: the device and host memory in which plans place buffers.

Both are plain byte tensors. Tensors of any dtype are views of them.
"""

from __future__ import annotations

import torch

from ds_finepage.execution.host_ops import host_bytes
from ds_finepage.graph.memgraph import Extent
from ds_finepage.graph.taskgraph import TensorView

POISON = 0xFF
"""The byte that fills vacated extents in debug mode: every float made of it is NaN."""


class Arena:
    """One allocation of bytes on a device.

    ``bytes`` is a 1-d uint8 tensor of ``nbytes``.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        # Outside of inference mode, so that every mode can write its views.
        with torch.inference_mode(False):
            self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)

    def slice(self, extent: Extent, nbytes: int) -> torch.Tensor:
        """Return the first ``nbytes`` of an extent as a 1-d uint8 tensor."""
        return self.bytes[extent.offset : extent.offset + nbytes]

    def view(self, view: TensorView, extent: Extent) -> torch.Tensor:
        """Return a tensor of the graph whose buffer lies in ``extent``."""
        return view_of(self.bytes, view, extent.offset)


def view_of(storage_of: torch.Tensor, view: TensorView, offset_bytes: int = 0) -> torch.Tensor:
    """Build a tensor of the graph on the storage of another tensor.

    Args:
        storage_of: Any tensor; only its storage is used.
        view: Dtype, shape, strides, and the offset in elements from ``offset_bytes``.
        offset_bytes: The begin of the buffer in the storage.
    """
    before = storage_of.untyped_storage().nbytes()
    with torch.inference_mode(False), torch.no_grad():
        found = place(storage_of, view, offset_bytes)
    assert storage_of.untyped_storage().nbytes() == before, "torch makes a short storage longer"
    return found


def place(storage_of: torch.Tensor, view: TensorView, offset_bytes: int = 0) -> torch.Tensor:
    """Build a tensor as :func:`view_of` does, in the caller's own mode of autograd."""
    dtype: torch.dtype = getattr(torch, view.dtype)
    return torch.empty(0, dtype=dtype, device=storage_of.device).set_(
        storage_of.untyped_storage(),
        offset_bytes // dtype.itemsize + view.offset,
        view.shape,
        view.stride,
    )


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor's bytes as a 1-d uint8 tensor on the same storage."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.detach().reshape(-1).view(torch.uint8)


class HostPool:
    """The pinned pool: host memory for offloaded buffers. It grows between passes only.

    ``bytes`` is a 1-d uint8 tensor. If it is pinned, a copy engine can read its pages by itself.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def reserve(self, nbytes: int) -> None:
        """Make room for ``nbytes``; the old contents are lost."""
        if nbytes > self.bytes.numel():
            with torch.inference_mode(False):
                self.bytes = host_bytes(nbytes, pinned=self.pinned)

    def slice(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a slot as a 1-d uint8 tensor."""
        return self.bytes[offset : offset + nbytes]
