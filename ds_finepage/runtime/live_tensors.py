"""Device tensors that passes have seen, and that are still alive.

The output of an encoder lives while its decoder runs; the KV cache of one chat lives while another
chat runs. Their bytes are on the device, so they count against the budget of every other pass.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ds_finepage._compat.torch import StorageWeakRef
from ds_finepage.planning.budget import selected_bytes
from ds_finepage.runtime.passes import Pass
from ds_finepage.runtime.ranks import ONE_RANK, Ranks


class LiveTensors:
    """Refers weakly to the device tensors that passes have read or returned.

    Attributes:
        caller_bytes: Bytes of tensors that the caller makes of outputs, beyond a few rows.
    """

    def __init__(self) -> None:
        self.caller_bytes = 0
        self._known: dict[StorageWeakRef, int] = {}  # -> bytes

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note the inputs and outputs of a pass, or the rows of a KV cache, say."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self._known[StorageWeakRef(storage)] = storage.nbytes()

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """Forget tensors that are about to leave the device."""
        for tensor in tensors:
            self._known.pop(StorageWeakRef(tensor.untyped_storage()), None)

    def reserve(
        self,
        found: Pass,
        args: Sequence[Any],
        budget_bytes: int,
        *,
        is_reordered: bool = False,
        ranks: Ranks = ONE_RANK,
    ) -> None:
        """Let a pass leave room for live tensors that are no arguments of its call.

        If its KV cache ``is_reordered`` after it, its sequences are copied.
        """
        inputs = found.inputs(args)
        copied_bytes = selected_bytes(found.graph) if is_reordered else 0
        live_bytes = self.bytes_beside(inputs) + copied_bytes
        if not found.has_room(live_bytes, budget_bytes):
            gc.collect(1)  # tensors in dead cycles are still there, mostly in young ones
            live_bytes = self.bytes_beside(inputs) + copied_bytes
        if not found.has_room(live_bytes, budget_bytes) and live_bytes != found.unfit_bytes:
            gc.collect()  # it takes half a second, so it is not done for the same bytes again
            found.unfit_bytes = live_bytes = self.bytes_beside(inputs) + copied_bytes
        found.leave_room(ranks.most("room for live tensors", live_bytes), budget_bytes)

    def bytes_beside(self, inputs: Iterable[torch.Tensor]) -> int:
        """Add up the bytes of live tensors that are no inputs of the next pass."""
        self._known = {ref: n for ref, n in self._known.items() if not ref.expired()}
        taken = {tensor.untyped_storage()._cdata for tensor in inputs}
        beside = sum(n for ref, n in self._known.items() if ref.cdata not in taken)
        return beside + self.caller_bytes
