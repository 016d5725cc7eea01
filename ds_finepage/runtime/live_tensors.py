"""What passes were given and have made, and somebody still holds.

A tensor that one pass returned may outlive it without being given to the next: the output of an
encoder while its decoder runs, the KV cache of another chat. Its bytes are on the device, so they
count against the budget of whatever runs then.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from ds_finepage._compat.torch import StorageWeakRef


class Held:
    """Device tensors that passes have seen, held weakly."""

    def __init__(self, other: Held | None = None) -> None:
        """Start empty, or with what another one knows of."""
        self._latest: list[weakref.ref[torch.Tensor]] = list(other._latest) if other else []
        self._known: dict[StorageWeakRef, int] = dict(other._known) if other else {}  # -> bytes

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note what the pass that ran last was given and has made; called after every pass."""
        self._latest = [weakref.ref(tensor) for tensor in tensors]

    def bytes_beside(self, given: Iterable[torch.Tensor]) -> int:
        """Count the bytes of tensors that are still alive, but for those given to the next pass.

        It is asked when another pass runs than the one before.
        """
        alive = (ref() for ref in self._latest)
        for storage in (tensor.untyped_storage() for tensor in alive if tensor is not None):
            self._known[StorageWeakRef(storage)] = storage.nbytes()
        self._latest = []
        self._known = {ref: n for ref, n in self._known.items() if not ref.expired()}
        taken = {tensor.untyped_storage()._cdata for tensor in given}
        return sum(n for ref, n in self._known.items() if ref.cdata not in taken)
