"""The weights of a model that lie in files, and copies of some of their bytes in host memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ds_finepage.errors import StoreError
from ds_finepage.execution.device import device_of
from ds_finepage.execution.disk import PIECE_BYTES, FileRange, FileReader
from ds_finepage.graph.taskgraph import Buffer, name_of_key
from ds_finepage.units import align_up

AHEAD_SHARE = 8
"""Of a host budget, one part in so many is what the disk may read ahead."""


class FileWeights:
    """Says where the bytes of a weight are: in a file, or in host memory too.

    Attributes:
        sources: Qualified name -> bytes of a file, of weights whose masters are mapped files.
        held: ``Buffer.key`` -> copy in host memory, 1-d uint8.
        reader: Reads the files.
    """

    def __init__(self, where: torch.device) -> None:
        """Begin without a weight."""
        self._where = where
        self.sources: dict[str, FileRange] = {}
        self.held: dict[str, torch.Tensor] = {}
        self.reader = FileReader(where)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights in files."""
        return sum(source.nbytes for source in self.sources.values())

    @property
    def held_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.numel() for copy in self.held.values())

    @property
    def host_bytes(self) -> int:
        """Bytes in host memory: the copies, and the staging memory of the reader."""
        return self.held_bytes + self.reader.staging_bytes if self.sources else 0

    def read_ahead(self, most_bytes: int) -> None:
        """Let the disk read one weight ahead, as far as some bytes of host memory go."""
        largest = max((source.nbytes for source in self.sources.values()), default=0)
        self.reader = FileReader(self._where, min(align_up(largest, PIECE_BYTES), most_bytes))

    def follow(self, sources: Mapping[str, FileRange]) -> None:
        """Take the weights that lie in files now; forget the copies of others."""
        self.sources = dict(sources)
        self.held = {k: copy for k, copy in self.held.items() if name_of_key(k) in self.sources}

    def add(self, buffers: Iterable[Buffer]) -> None:
        """Make copies of weights, or of slices of them.

        Raises:
            StoreError: A file cannot be read, or is not what it was.
        """
        for buffer in buffers:
            copy = device_of(self._where).new_pinned(buffer.nbytes)
            self.reader.copy(self.source_of(buffer), copy)
            self.held[buffer.key] = copy

    def drop(self, keys: Iterable[str]) -> None:
        """Free copies; no plan may be bound to them."""
        for key in list(keys):
            del self.held[key]

    def source_of(self, buffer: Buffer) -> FileRange:
        """Return the bytes of a buffer in its file.

        Raises:
            StoreError: It lies in none.
        """
        source = self.sources.get(buffer.name)
        if source is None:
            raise StoreError(f"weight {buffer.name!r} lies in no file")
        return source.part(buffer.offset, buffer.offset + buffer.nbytes)
