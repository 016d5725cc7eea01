"""Weights that stay in files: the bytes of a file that a tensor shows, and direct reads of them.

transformers maps the safetensors files of a checkpoint and makes parameters of the mapped memory,
where the dtype stays. Such a parameter takes no memory of its own: the system reads its pages from
the file, and forgets them again. The tables of the process tell the file of each address, and which
pages were written since.

Page by page, a mapping is read at a tenth of the disk's rate. So plans read past the page cache, in
large pieces, several at once.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import stat
import sys
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ds_finepage.errors import StoreError
from ds_finepage.execution.device import device_of
from ds_finepage.units import align_up

logger = logging.getLogger(__name__)

LEAST_BYTES = 1 << 16
"""A smaller tensor is not looked for in a file: it always has a copy in host memory."""

PIECE_BYTES = 4 << 20
"""Bytes of one read. Larger ones are not faster; smaller ones wait for the disk more often."""

NUM_PIECES = 4
"""Pieces on their way at once: they keep the disk busy while one is copied to the device."""

PAGE = mmap.PAGESIZE

PAGES = "/proc/self/pagemap"
"""Tells of each page of this process whether it is that of a file."""


def staging_bytes(ahead_bytes: int) -> int:
    """Return the host memory of a reader that reads so many bytes ahead."""
    return (NUM_PIECES + ahead_bytes // PIECE_BYTES) * PIECE_BYTES + PAGE


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of a file.

    Attributes:
        path: The file.
        offset: The first byte.
        nbytes: How many.
        identity: Of the file when they were found: its number on the disk, its size in bytes, and
            the time of the last change.
    """

    path: str
    offset: int
    nbytes: int
    identity: tuple[int, int, int]

    def part(self, begin: int, end: int) -> FileRange:
        """Return some of the bytes."""
        return replace(self, offset=self.offset + begin, nbytes=end - begin)


def files_of(tensors: Sequence[torch.Tensor]) -> list[FileRange | None]:
    """Return the bytes of files that tensors show, unchanged; None for each that has its own.

    Only Linux tells; elsewhere, and where its tables are hidden, no tensor is found in a file.
    """
    large = [t for t in tensors if t.is_cpu and t.nbytes >= LEAST_BYTES and t.is_contiguous()]
    large = [t for t in large if not t.is_inference()]  # its master is a copy
    if sys.platform != "linux" or not large:
        return [None] * len(tensors)
    found: dict[int, FileRange | None] = {}
    with suppress(OSError), open(PAGES, "rb", buffering=0) as pages:
        mappings = _mappings()
        starts = [begin for begin, *_ in mappings]
        for tensor in large:
            begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
            i = bisect_right(starts, begin) - 1
            if i >= 0 and end <= mappings[i][1] and not _was_written(pages.fileno(), begin, end):
                start, _, offset, path = mappings[i]
                found[id(tensor)] = range_of(path, offset + begin - start, tensor.nbytes)
    return [found.get(id(tensor)) for tensor in tensors]


def _mappings() -> list[tuple[int, int, int, str]]:
    """Return begin, end, offset in the file, and path of mapped files, by address."""
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            addresses, _, offset, _, _, *path = line.rstrip("\n").split(maxsplit=5)
            if path and path[0].startswith("/"):
                begin, end = (int(address, 16) for address in addresses.split("-"))
                found.append((begin, end, int(offset, 16), path[0]))
    return found


def _was_written(pages: int, begin: int, end: int) -> bool:
    """Tell whether a page between two addresses is no longer that of the file."""
    first, last = begin // PAGE, (end - 1) // PAGE
    words = os.pread(pages, 8 * (last - first + 1), 8 * first)
    entries = torch.frombuffer(bytearray(words), dtype=torch.int64)
    is_there, is_swapped, is_file = (((entries >> bit) & 1).bool() for bit in (63, 62, 61))
    return bool((is_swapped | (is_there & ~is_file)).any())


def range_of(path: str, offset: int, nbytes: int) -> FileRange | None:
    """Return a range of a file; None where there is no such file."""
    try:
        found = os.stat(path)
    except OSError:  # it was removed or replaced, which the system adds to its name
        return None
    if not stat.S_ISREG(found.st_mode) or offset + nbytes > found.st_size:
        return None
    return FileRange(path, offset, nbytes, _identity(found))


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


class _Read:
    """A range that is being read in pieces, in order, into staging memory."""

    def __init__(self, source: FileRange, free: list[torch.Tensor]) -> None:
        """Begin with no piece; ``free`` has staging memory, and gets it back."""
        self.source, self._free = source, free
        self._file: int | None = None
        self._end = source.offset + source.nbytes
        self._begins = deque(range(source.offset // PAGE * PAGE, self._end, PIECE_BYTES))
        self._busy: deque[tuple[Future[int], torch.Tensor, int]] = deque()

    def start(self, threads: ThreadPoolExecutor, flags: int) -> bool:
        """Read as many pieces as there is memory for; return True where all are on their way."""
        if self._file is None:
            self._file = os.open(self.source.path, os.O_RDONLY | flags)
        while self._begins and self._free:
            piece, begin = self._free.pop(), self._begins.popleft()
            future = threads.submit(os.preadv, self._file, [piece.numpy().data], begin)
            self._busy.append((future, piece, begin))
        return not self._begins

    def parts(self, threads: ThreadPoolExecutor, flags: int) -> Iterator[torch.Tensor]:
        """Read all; yield the bytes in order. Each part is valid until the next one is asked for.

        Raises:
            OSError: The disk does.
            StoreError: The file changed.
        """
        self.start(threads, flags)
        while self._busy:
            future, piece, begin = self._busy[0]
            first, last = max(self.source.offset - begin, 0), min(self._end - begin, PIECE_BYTES)
            if future.result() < last:
                raise self._changed()
            yield piece[first:last]
            self._busy.popleft()
            self._free.append(piece)
            self.start(threads, flags)
        assert self._file is not None
        if _identity(os.fstat(self._file)) != self.source.identity:
            raise self._changed()

    def close(self, flags: int) -> None:
        """Wait for the reads that are on their way; give their memory back."""
        wait([future for future, *_ in self._busy])
        self._free.extend(piece for _, piece, _ in self._busy)
        self._busy.clear()
        if self._file is None:
            return
        if not flags:
            where = self.source.offset, self.source.nbytes, os.POSIX_FADV_DONTNEED
            os.posix_fadvise(self._file, *where)
        os.close(self._file)
        self._file = None

    def _changed(self) -> StoreError:
        return StoreError(
            f"{self.source.path} is not the file that the model was loaded from: it changed, or is "
            f"another one now. Load the model again."
        )


class FileReader:
    """Copies ranges of files into memory of a device, past the page cache.

    It reads ahead: while a range waits for its place on the device, the disk reads the next one.

    Attributes:
        read_bytes: Bytes that were copied so far.
        staging_bytes: Host memory that it takes from its first read on.
    """

    def __init__(self, where: torch.device, ahead_bytes: int = 0) -> None:
        """Take no memory yet; ``ahead_bytes`` is the staging memory for what is read ahead."""
        self.read_bytes = 0
        self._where = where
        self._num_ahead = ahead_bytes // PIECE_BYTES
        self.staging_bytes = staging_bytes(ahead_bytes)
        self._block: torch.Tensor | None = None
        self._at_once: list[torch.Tensor] = []  # free staging memory
        self._ahead: list[torch.Tensor] = []  # and that of what is read ahead
        self._queue: deque[_Read] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._process = os.getpid()
        self._direct = getattr(os, "O_DIRECT", 0)
        self._lock = threading.Lock()  # there is one disk

    def expect(self, sources: Sequence[FileRange]) -> None:
        """Read ahead; these ranges are copied next, in this order."""
        if not self._num_ahead:
            return
        with self._lock:
            threads = self._begin()
            queued = [read.source for read in self._queue]
            if queued != list(sources[: len(queued)]):
                self._forget()
            new = sources[len(self._queue) :]
            self._queue.extend(_Read(source, self._ahead) for source in new)
            with suppress(OSError, StoreError):  # their copies will say so
                self._advance(threads)

    def copy(self, source: FileRange, target: torch.Tensor) -> None:
        """Copy a range of a file; on an accelerator the host waits for its current stream.

        Args:
            source: The range.
            target: 1-d uint8 of as many bytes.

        Raises:
            StoreError: The file cannot be read, or is not what it was.
        """
        with self._lock:
            try:
                self._copy(source, target)
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise StoreError(
                        f"{source.path}: bytes {source.offset} to {source.offset + source.nbytes} "
                        f"cannot be read: {error.strerror}"
                    ) from error
                self._direct = 0
                logger.warning(
                    "%s is read through the page cache: its file system has no direct reads",
                    source.path,
                )
                self._copy(source, target)
            self.read_bytes += source.nbytes

    def _copy(self, source: FileRange, target: torch.Tensor) -> None:
        threads = self._begin()
        is_expected = bool(self._queue) and self._queue[0].source == source
        read = self._queue[0] if is_expected else _Read(source, self._at_once)
        device, done = device_of(self._where), 0
        try:
            for part in read.parts(threads, self._direct):
                target[done : done + part.numel()].copy_(part, non_blocking=True)
                done += part.numel()
                device.synchronize_stream()  # the next read takes the place of this one
        except BaseException:
            self._forget()
            raise
        finally:
            read.close(self._direct)
        if is_expected:
            self._queue.popleft()
            with suppress(OSError, StoreError):
                self._advance(threads)

    def close(self) -> None:
        """Forget what is read ahead, and end the threads."""
        with self._lock:
            self._begin()
            self._forget()
            if self._threads is not None:
                self._threads.shutdown()
            self._threads = None

    def _advance(self, threads: ThreadPoolExecutor) -> None:
        for read in self._queue:
            if not read.start(threads, self._direct):
                break

    def _forget(self) -> None:
        for read in self._queue:
            read.close(self._direct)
        self._queue.clear()

    def _begin(self) -> ThreadPoolExecutor:
        """Return the threads, and take the memory that they fill: direct reads need whole pages."""
        if self._process != os.getpid():  # a fork has no threads, and not what they read
            self._process, self._threads, self._block = os.getpid(), None, None
            self._queue.clear()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_PIECES, "finepage-disk")
        if self._block is None:
            self._block = device_of(self._where).new_pinned(self.staging_bytes)
            begin = align_up(self._block.data_ptr(), PAGE) - self._block.data_ptr()
            pieces = [*self._block[begin:].split(PIECE_BYTES)][: NUM_PIECES + self._num_ahead]
            self._at_once, self._ahead = pieces[:NUM_PIECES], pieces[NUM_PIECES:]
        return self._threads
