"""Counts the bytes that stock DeepSpeed copies to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class FetchCounter:
    """Counts the bytes that stock DeepSpeed fetches, forward by forward.

    On the CPU a fetch only gives the host partition another name. A counted fetch copies, as on a
    GPU, so that a memory meter sees it.

    Attributes:
        nbytes: Bytes of all fetches so far.
        prefill_bytes: Bytes of the last watched forward of several tokens.
        decode_bytes: Bytes of the last watched forward of one token.
    """

    def __init__(self) -> None:
        """Count nothing until :meth:`install`."""
        self.nbytes = self.prefill_bytes = self.decode_bytes = 0
        self._is_prefill: bool | None = None

    def install(self) -> Callable[[], None]:
        """Wrap the one function of DeepSpeed that fetches on a single rank; return the undoing."""
        from ds_finepage._compat.deepspeed import partition_parameters

        fetch: Callable[[list[Any]], Any] = partition_parameters._no_gather_coalesced

        def counted(params: Iterable[Any]) -> Any:
            params = list(params)
            handle = fetch(params)
            for param in params:
                self._count(param.ds_tensor.nbytes)
                if param.data.device == param.ds_tensor.device:
                    param.data = param.data.clone()
            return handle

        partition_parameters._no_gather_coalesced = counted
        return lambda: setattr(partition_parameters, "_no_gather_coalesced", fetch)

    def watch(self, module: Any) -> None:
        """Start a new count with each forward of ``module``, before DeepSpeed's hooks fetch."""

        def begin(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            input_ids = args[0] if args else kwargs["input_ids"]
            self._is_prefill = input_ids.shape[-1] > 1
            if self._is_prefill:
                self.prefill_bytes = 0
            else:
                self.decode_bytes = 0

        module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)

    def _count(self, nbytes: int) -> None:
        self.nbytes += nbytes
        if self._is_prefill:
            self.prefill_bytes += nbytes
        elif self._is_prefill is not None:  # None outside of any forward
            self.decode_bytes += nbytes
