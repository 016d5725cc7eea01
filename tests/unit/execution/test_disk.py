"""Weights in files: where they are found, how they are read, and what is refused."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ds_finepage.errors import StoreError
from ds_finepage.execution import disk
from ds_finepage.execution.disk import PAGE, PIECE_BYTES, FileRange, FileReader, files_of

CPU = torch.device("cpu")
NUMEL = 40_000  # of float32: no whole number of pages


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    found = tmp_path / "model.safetensors"
    save_file({f"w{i}": torch.randn(NUMEL) for i in range(3)} | {"small": torch.ones(8)}, found)
    return found


def mapped(path: Path) -> list[torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return [file.get_tensor(name) for name in sorted(file.keys())]


def source_of(path: Path, offset: int, nbytes: int) -> FileRange:
    found = os.stat(path)
    return FileRange(str(path), offset, nbytes, (found.st_ino, found.st_size, found.st_mtime_ns))


def test_a_mapped_tensor_is_found_in_its_file(path: Path) -> None:
    small, *tensors = mapped(path)
    found = files_of([small, *tensors, torch.ones(NUMEL), tensors[0][::2], tensors[1].to("meta")])
    assert found[0] is None and found[4:] == [None] * 3
    with torch.inference_mode():
        assert files_of(mapped(path)) == [None] * 4  # their masters are copies
    content = path.read_bytes()
    for source, tensor in zip(found[1:4], tensors, strict=True):
        assert source is not None and source.path == str(path)
        own = content[source.offset : source.offset + source.nbytes]
        assert own == tensor.numpy().tobytes()


def test_a_tensor_that_was_written_is_in_no_file(path: Path) -> None:
    _, first, second, third = mapped(path)
    second[NUMEL // 2] = 7.0
    assert [each is None for each in files_of([first, second, third])] == [False, True, False]


@pytest.mark.parametrize(
    ("module", "name", "value"), [(sys, "platform", "darwin"), (disk, "PAGES", "/missing")]
)
def test_a_system_that_has_no_tables_or_hides_them_finds_no_file(
    path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: str
) -> None:
    monkeypatch.setattr(module, name, value)
    assert files_of(mapped(path)) == [None] * 4


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, 1),
        (PAGE - 1, 2),
        (PAGE, PAGE),
        (8, 9 * PIECE_BYTES + 5),
        (PAGE + 3, PIECE_BYTES),
        (10 * PIECE_BYTES - 7, 17),
    ],
)
@pytest.mark.parametrize("is_direct", [True, False])
def test_a_range_is_read(tmp_path: Path, offset: int, nbytes: int, is_direct: bool) -> None:
    content = torch.arange(10 * PIECE_BYTES + 10, dtype=torch.int32).to(torch.uint8)
    (path := tmp_path / "bytes").write_bytes(content.numpy().tobytes())
    reader, target = FileReader(CPU), torch.zeros(nbytes, dtype=torch.uint8)
    if not is_direct:
        reader._direct = 0
    for _ in range(2):
        reader.copy(source_of(path, offset, nbytes), target)
        assert torch.equal(target, content[offset : offset + nbytes])
    assert reader.read_bytes == 2 * nbytes


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def write(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x")
    os.utime(path, ns=(1, 1))


def replace(path: Path) -> None:
    path.with_name("other").write_bytes(path.read_bytes())
    path.with_name("other").rename(path)


@pytest.mark.parametrize("end", [Path.unlink, replace])
def test_a_file_that_has_gone_is_not_found(path: Path, end: Callable[[Path], None]) -> None:
    tensors = mapped(path)
    end(path)
    assert files_of(tensors) == [None] * 4


@pytest.mark.parametrize("change", [shorten, write, replace])
def test_a_file_that_changed_is_refused(path: Path, change: Callable[[Path], None]) -> None:
    source, target = source_of(path, 8, 80_000), torch.zeros(80_000, dtype=torch.uint8)
    change(path)
    with pytest.raises(StoreError, match=r"model.safetensors is not the file .* Load the model"):
        FileReader(CPU).copy(source, target)


def test_a_file_that_changes_while_it_is_read_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, preadv = source_of(path, 8, 80_000), os.preadv

    def changing(*given: Any) -> int:
        write(path)
        return preadv(*given)

    monkeypatch.setattr(disk.os, "preadv", changing)
    with pytest.raises(StoreError, match="it changed"):
        FileReader(CPU).copy(source, torch.zeros(80_000, dtype=torch.uint8))


def test_a_read_that_ends_early_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk.os, "preadv", lambda *given: 5)
    with pytest.raises(StoreError, match="it changed"):
        FileReader(CPU).copy(source_of(path, 8, 80_000), torch.zeros(80_000, dtype=torch.uint8))


def test_an_error_names_file_and_bytes_and_the_next_read_works(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = source_of(path, 8, 80_000), torch.zeros(80_000, dtype=torch.uint8)
    reader = FileReader(CPU)
    with monkeypatch.context() as broken:

        def fail(*given: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        broken.setattr(disk.os, "preadv", fail)
        with pytest.raises(StoreError, match=r"safetensors: bytes 8 to 80008 .* Input/output"):
            reader.copy(source, target)
    reader.copy(source, target)
    assert target.numpy().tobytes() == path.read_bytes()[8:80_008]


def test_a_file_system_without_direct_reads_is_read_through_its_cache_and_says_so_once(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened, freed, open_file = [], [], os.open

    def refusing(name: str, flags: int) -> int:
        opened.append(flags)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return open_file(name, flags)

    monkeypatch.setattr(disk.os, "open", refusing)
    monkeypatch.setattr(disk.os, "posix_fadvise", lambda *given: freed.append(given[1:]))
    source, target = source_of(path, 8, 80_000), torch.zeros(80_000, dtype=torch.uint8)
    reader = FileReader(CPU)
    for _ in range(2):
        reader.copy(source, target)
    assert target.numpy().tobytes() == path.read_bytes()[8:80_008]
    assert caplog.text.count("its file system has no direct reads") == 1
    assert [bool(flags & os.O_DIRECT) for flags in opened] == [True, False, False]
    assert freed == [(8, 80_000, os.POSIX_FADV_DONTNEED)] * 2


def test_no_file_stays_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, source = FileReader(CPU), source_of(path, 8, 80_000)
    target = torch.zeros(80_000, dtype=torch.uint8)
    reader.copy(source, target)
    before = len(os.listdir("/proc/self/fd"))
    reader.copy(source, target)
    shorten(path)
    with pytest.raises(StoreError):
        reader.copy(source, target)
    assert len(os.listdir("/proc/self/fd")) == before


def test_ctrl_c_waits_for_the_reads_that_are_on_their_way(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They write to the staging memory, which the next read takes."""
    reader, source = FileReader(CPU), source_of(path, 8, 80_000)
    waited: list[int] = []

    class Pressed(torch.Tensor):
        def __getitem__(self, index: Any) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setattr(disk, "wait", lambda busy: waited.append(len(busy)))
    with pytest.raises(KeyboardInterrupt):
        reader.copy(source, torch.zeros(80_000, dtype=torch.uint8).as_subclass(Pressed))
    assert waited == [1]


def test_a_forked_process_reads_with_threads_of_its_own(path: Path) -> None:
    reader, source = FileReader(CPU, disk.PIECE_BYTES), source_of(path, 8, 80_000)
    target = torch.zeros(80_000, dtype=torch.uint8)
    reader.expect([source, source])
    reader.copy(source, target)
    gc.collect()
    child = os.fork()
    if child == 0:  # pragma: no cover
        signal.alarm(20)  # it would wait for threads that are not there
        for _ in range(2):  # the first was read ahead
            target.zero_()
            reader.copy(source, target)
        os._exit(int(target.numpy().tobytes() != path.read_bytes()[8:80_008]))
    assert os.waitpid(child, 0)[1] == 0


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PIECE_BYTES", 4 * PAGE)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("num_pieces", [1, 2, 5])
def test_a_range_is_read_ahead_with_few_pieces(path: Path, num_pieces: int) -> None:
    content, source = path.read_bytes(), source_of(path, 9, 200_000)
    reader = FileReader(CPU, num_pieces * disk.PIECE_BYTES)
    for _ in range(3):
        target = torch.zeros(200_000, dtype=torch.uint8)
        reader.expect([source, source_of(path, 5000, 90_000)])
        reader.copy(source, target)
        assert target.numpy().tobytes() == content[9:200_009]


@pytest.mark.usefixtures("small_pieces")
def test_the_next_ranges_are_read_ahead(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, asked, preadv = path.read_bytes(), [], os.preadv
    sources = [source_of(path, 8 + i * 100_000, 100_000) for i in range(4)]

    def noting(file: int, buffers: Any, position: int) -> int:
        asked.append(position)
        return preadv(file, buffers, position)

    monkeypatch.setattr(disk.os, "preadv", noting)
    reader, target = FileReader(CPU, 150_000), torch.zeros(100_000, dtype=torch.uint8)
    reader.expect(sources)
    disk.wait([future for read in reader._queue for future, *_ in read._busy])
    assert len(asked) == 150_000 // disk.PIECE_BYTES  # as far as there is memory
    for i in [0, 1, 3, 2, 3]:  # the fourth comes earlier than expected
        reader.copy(sources[i], target)
        assert target.numpy().tobytes() == content[8 + i * 100_000 : 8 + (i + 1) * 100_000]
    assert not reader._queue
    assert reader.read_bytes == 500_000
    assert len(asked) == 5 * -(-100_008 // disk.PIECE_BYTES)  # nothing is read twice


@pytest.mark.usefixtures("small_pieces")
def test_what_is_read_ahead_is_forgotten_if_something_else_comes(path: Path) -> None:
    sources = [source_of(path, 8 + i * 100_000, 100_000) for i in range(4)]
    reader, target = FileReader(CPU, 150_000), torch.zeros(100_000, dtype=torch.uint8)
    reader.expect(sources)
    reader.copy(sources[0], target)
    reader.expect([*sources[1:], sources[0]])  # the same, and one more
    assert [read.source for read in reader._queue] == [*sources[1:], sources[0]]
    reader.expect(sources[2:])
    assert [read.source for read in reader._queue] == sources[2:]
    for source in sources[2:]:
        reader.copy(source, target)
    free = len(reader._ahead) + len(reader._at_once)
    assert free == reader.staging_bytes // disk.PIECE_BYTES and not reader._queue


@pytest.mark.usefixtures("small_pieces")
def test_after_an_error_nothing_is_ahead(path: Path) -> None:
    sources = [source_of(path, 8 + i * 100_000, 100_000) for i in range(3)]
    reader, target = FileReader(CPU, 150_000), torch.zeros(100_000, dtype=torch.uint8)
    reader.expect(sources)
    shorten(path)
    with pytest.raises(StoreError, match="it changed"):
        reader.copy(sources[2], target)
    assert not reader._queue
    assert len(reader._ahead) + len(reader._at_once) == reader.staging_bytes // disk.PIECE_BYTES


@pytest.mark.usefixtures("small_pieces")
def test_an_error_in_a_range_that_is_read_ahead_is_that_of_its_copy(path: Path) -> None:
    sources = [source_of(path, 8 + i * 100_000, 100_000) for i in range(2)]
    reader, target = FileReader(CPU, 150_000), torch.zeros(100_000, dtype=torch.uint8)
    shorten(path)
    reader.expect(sources)
    for source in sources:
        with pytest.raises(StoreError, match="it changed"):
            reader.copy(source, target)
    assert len(reader._ahead) + len(reader._at_once) == reader.staging_bytes // disk.PIECE_BYTES


def test_a_part_of_a_range(path: Path) -> None:
    source = source_of(path, 100, 50).part(10, 30)
    assert (source.offset, source.nbytes) == (110, 20)
