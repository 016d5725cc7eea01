"""Device tensors that passes have seen, and that somebody still holds.

The output of an encoder lives while its decoder runs; the KV cache of one chat lives while another
chat runs. Their bytes are on the device, so they count against the budget of every other pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class LiveTensors:
    """Refers weakly to the device tensors that passes have read or returned."""

    def __init__(self, other: LiveTensors | None = None) -> None:
        """Start empty, or with the tensors that another table knows."""
        self._latest: list[weakref.ref[torch.Tensor]] = list(other._latest) if other else []
        self._known: dict[StorageWeakRef, int] = dict(other._known) if other else {}  # -> bytes

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the inputs and outputs of the pass that ran last."""
        self._latest = [weakref.ref(tensor) for tensor in tensors]

    def bytes_beside(self, inputs: Iterable[torch.Tensor]) -> int:
        """Add up the bytes of live tensors that are no inputs of the next pass.

        Args:
            inputs: Device tensors that the next pass reads.
        """
        alive = (ref() for ref in self._latest)
        for storage in (tensor.untyped_storage() for tensor in alive if tensor is not None):
            self._known[StorageWeakRef(storage)] = storage.nbytes()
        self._latest = []
        self._known = {ref: n for ref, n in self._known.items() if not ref.expired()}
        taken = {tensor.untyped_storage()._cdata for tensor in inputs}
        return sum(n for ref, n in self._known.items() if ref.cdata not in taken)
