"""ZeRO's host partitions on one rank, filled where they are.

On one rank a partition is the whole parameter, so that a checkpoint can be read straight into it:
nothing is gathered, on the device or beside it.

Imported only while a checkpoint is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ds_finepage._compat.deepspeed import GatheredParameters, ZeroParamStatus
from ds_finepage._compat.torch import StorageWeakRef, TorchDispatchMode, tree_leaves

_ALLOCATIONS = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
    torch.ops.aten.new_empty_strided,
)


class PartitionsInPlace(GatheredParameters):  # type: ignore[misc]
    """Shows parameters as their own partitions where they are to be changed; else gathers them.

    Attributes:
        shown: Each parameter that is shown, what it was, and its partition in its full shape.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
            params = list(params)
        else:
            params = [params]
        self.shown: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
        self._in_place: list[Any] = []
        if modifier_rank == 0 and kwargs.get("enabled", True) and all(map(_is_whole, params)):
            self._in_place = list({id(p): p for p in params}.values())
            kwargs["enabled"] = False
        super().__init__(params, modifier_rank, *args, **kwargs)

    def __enter__(self) -> None:
        for parameter in self._in_place:
            whole = parameter.ds_tensor.data.narrow(0, 0, parameter.ds_numel)
            whole = whole.view(parameter.ds_shape)
            self.shown.append((parameter, parameter.data, whole))
            parameter.data = whole
        super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        for parameter, partitioned, whole in self.shown:
            if parameter.data.data_ptr() != whole.data_ptr():  # was given other memory meanwhile
                whole.copy_(parameter.data)
            parameter.data = partitioned
        self.shown.clear()


def _is_whole(parameter: Any) -> bool:
    """True where a parameter's partition is all there is of it, in memory, as it is."""
    partition = getattr(parameter, "ds_tensor", None)
    return (
        partition is not None
        and parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE
        and partition.final_location is None  # not in a file
        and partition.dtype == parameter.dtype
        and partition.numel() >= parameter.ds_numel
        and not hasattr(partition, "ds_quant_scale")
        and getattr(parameter, "ds_secondary_tensor", None) is None
    )


class NothingIntoNothing(TorchDispatchMode):
    """Leaves out copies from unwritten memory into unwritten memory.

    While transformers builds a model whose weights a checkpoint will bring, they are as ``empty``
    made them, and ZeRO copies each into its partition. A copy makes the pages of both resident; the
    partitions would hold the whole model before the first byte is read, and those of tied weights,
    which are dropped later, on top of it.

    Invariant: a storage is unwritten from its allocation in this mode until the first op that may
    write into it. A weak reference keeps its identity from being given to another.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unwritten: set[StorageWeakRef] = set()

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an op, or leave it out."""
        if op is torch.ops.aten.copy_.default and all(map(self._is_unwritten, args[:2])):
            return args[0]
        result = op(*args, **(kwargs or {}))
        if op.overloadpacket in _ALLOCATIONS:
            self._unwritten.add(StorageWeakRef(result.untyped_storage()))
        # On one rank, a collective leaves everything as it was.
        elif op._schema.is_mutable and op.namespace != "c10d":
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, torch.Tensor):
                    self._unwritten.discard(StorageWeakRef(value.untyped_storage()))
        return result

    def _is_unwritten(self, tensor: torch.Tensor) -> bool:
        return StorageWeakRef(tensor.untyped_storage()) in self._unwritten
