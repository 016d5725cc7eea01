"""Tensors of a safetensors file that are read where they are used, and not kept.

Reads the file's header, produces tensors with its shapes and dtypes and without its bytes. An
op with such a tensor reads it into own memory while the op runs. So merging the experts of a layer
holds that layer, and a copy into a parameter holds a piece of it.

Imported only while a checkpoint is loaded.
"""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open

from ds_finepage._compat.torch import _disabled_torch_function_impl, tree_map_only
from ds_finepage.errors import StoreError

PIECE_BYTES = 4 << 20
"""What is held of a tensor while it is copied."""

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""The dtypes whose elements are whole bytes and mean the same in a file and in torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Where a tensor lies in a file: its elements in order, from byte ``offset`` on."""

    path: str
    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``start`` to ``stop`` in memory that goes back to the system with them.

        Not from torch's allocator: a heap keeps what it was given, between the weights that stay.

        Raises:
            StoreError: The file is shorter than it was.
        """
        num_bytes = (stop - start) * self.dtype.itemsize
        if num_bytes == 0:
            return torch.empty(0, dtype=self.dtype)
        memory = mmap.mmap(-1, num_bytes, access=mmap.ACCESS_COPY)
        with open(self.path, "rb", buffering=0) as file, memoryview(memory) as view:
            file.seek(self.offset + start * self.dtype.itemsize)
            done = 0
            while done < num_bytes:
                got = file.readinto(view[done:])
                if not got:
                    raise StoreError(
                        f"{self.path} ends within {self.name}: {done} bytes were left of "
                        f"{num_bytes}. It changed while it was loaded; load it again."
                    )
                done += got
        return torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype)


class FileTensor(torch.Tensor):
    """A tensor on the CPU whose bytes are in a file.

    Attributes:
        region: Where they are.
        changed: The bytes themselves, once an op has written into them.
    """

    region: Region
    changed: torch.Tensor | None

    @staticmethod
    def __new__(cls, region: Region) -> FileTensor:
        """Make the shell; nothing is read."""
        made = torch.Tensor._make_wrapper_subclass(cls, region.shape, dtype=region.dtype)
        assert isinstance(made, cls)
        made.region = region
        made.changed = None
        return made

    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an op on the bytes."""
        if op is torch.ops.aten.copy_.default and _copied_by_pieces(*args[:2]):
            return args[0]
        trim_heap()  # of what the ops before this one made, in a conversion
        keep = op._schema.is_mutable
        args, kwargs = tree_map_only(cls, lambda t: t._read(keep=keep), (args, kwargs or {}))
        return op(*args, **kwargs)

    def _read(self, *, keep: bool) -> torch.Tensor:
        if self.changed is not None:
            return self.changed
        found = self.region.read(0, self.region.num_elements).view(self.region.shape)
        if keep:
            self.changed = found
        return found


def _copied_by_pieces(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Copy from a file into a tensor of the same shape; False where that has to be done whole."""
    if (
        isinstance(target, FileTensor)
        or not isinstance(source, FileTensor)
        or source.changed is not None
        or target.shape != source.shape
        or not target.is_contiguous()
    ):
        return False
    region, flat = source.region, target.view(-1)
    step = max(1, PIECE_BYTES // region.dtype.itemsize)
    for start in range(0, region.num_elements, step):
        stop = min(start + step, region.num_elements)
        flat[start:stop].copy_(region.read(start, stop))
    return True


def trim_heap() -> None:
    """Give back to the system what the C library's heap holds free; nothing on other systems."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


def open_file(path: str | os.PathLike[str]) -> dict[str, torch.Tensor] | None:
    """Return a safetensors file's tensors, unread, in the order in which safetensors has them.

    Returns:
        None where the file has a dtype that is not in ``DTYPES``.

    Raises:
        safetensors.SafetensorError: The file is not valid.
    """
    with safe_open(path, framework="pt") as checked:
        names = list(checked.keys())
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    found: dict[str, torch.Tensor] = {}
    for name in names:
        entry = header[name]
        if entry["dtype"] not in DTYPES:
            return None
        region = Region(
            path=os.fspath(path),
            name=name,
            offset=8 + header_bytes + entry["data_offsets"][0],
            shape=tuple(entry["shape"]),
            dtype=DTYPES[entry["dtype"]],
        )
        found[name] = FileTensor(region)
    return found
