"""Where the tensors of a safetensors file lie, and their bytes."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import sys
from dataclasses import dataclass

import torch
from safetensors import safe_open

from ds_finepage.errors import StoreError

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

    def mapped(self) -> torch.Tensor:
        """Return all elements, 1-d, as mapped memory: the system reads its pages when needed."""
        size = os.path.getsize(self.path)
        file = torch.from_file(self.path, shared=False, size=size, dtype=torch.uint8)
        nbytes = math.prod(self.shape) * self.dtype.itemsize
        return file[self.offset : self.offset + nbytes].view(self.dtype)

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
        with open(self.path, "rb") as file:
            file.seek(self.offset + start * self.dtype.itemsize)
            done = file.readinto(memory)
        if done < num_bytes:
            raise StoreError(
                f"{self.path} ends within {self.name}: {done} bytes were left of {num_bytes}. It "
                f"changed while it was loaded; load it again."
            )
        return torch.frombuffer(memory, dtype=torch.uint8).view(self.dtype)


def trim_heap() -> None:
    """Give back to the system what the C library's heap holds free; nothing on other systems."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(ctypes.c_size_t(0))


def regions_of(path: str | os.PathLike[str]) -> dict[str, Region] | None:
    """Return where a safetensors file has its tensors, in the order in which safetensors has them.

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
    if any(header[name]["dtype"] not in DTYPES for name in names):
        return None
    return {
        name: Region(
            path=os.fspath(path),
            name=name,
            offset=8 + header_bytes + header[name]["data_offsets"][0],
            shape=tuple(header[name]["shape"]),
            dtype=DTYPES[header[name]["dtype"]],
        )
        for name in names
    }
