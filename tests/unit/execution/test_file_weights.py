"""Which bytes of weights in files have a copy in host memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ds_finepage.errors import StoreError
from ds_finepage.execution.disk import NUM_PIECES, PAGE, PIECE_BYTES, FileRange
from ds_finepage.execution.file_weights import FileWeights
from ds_finepage.graph.taskgraph import Buffer, BufferKind

CPU = torch.device("cpu")
NBYTES = 3000


@pytest.fixture
def files(tmp_path: Path) -> FileWeights:
    path = tmp_path / "weights"
    path.write_bytes(bytes(i % 251 for i in range(3 * NBYTES)))
    found = os.stat(path)
    identity = found.st_ino, found.st_size, found.st_mtime_ns
    made = FileWeights(CPU)
    made.follow({f"w{i}": FileRange(str(path), i * NBYTES, NBYTES, identity) for i in range(3)})
    return made


def buffer(name: str, offset: int = 0, nbytes: int = NBYTES) -> Buffer:
    return Buffer(id=0, kind=BufferKind.WEIGHT, nbytes=nbytes, name=name, offset=offset)


def test_a_copy_has_the_bytes_of_its_slice(files: FileWeights) -> None:
    piece = buffer("w1", 500, 700)
    assert files.source_of(piece).offset == NBYTES + 500
    files.add([piece, buffer("w2")])
    assert bytes(files.held[piece.key]) == bytes(i % 251 for i in range(3500, 4200))
    staging = NUM_PIECES * PIECE_BYTES + PAGE
    assert files.held_bytes == 700 + NBYTES and files.host_bytes == staging + 700 + NBYTES
    assert files.nbytes == 3 * NBYTES
    files.drop([piece.key])
    assert files.held.keys() == {buffer("w2").key}


def test_copies_go_with_their_file(files: FileWeights) -> None:
    files.add([buffer("w0"), buffer("w1")])
    files.follow({"w1": files.sources["w1"]})
    assert files.held.keys() == {buffer("w1").key}
    with pytest.raises(StoreError, match="weight 'w0' lies in no file"):
        files.source_of(buffer("w0"))
    files.follow({})
    assert files.host_bytes == 0 and not files.held


@pytest.mark.parametrize("most", [0, PIECE_BYTES, 1 << 40])
def test_one_weight_is_read_ahead_as_far_as_memory_goes(files: FileWeights, most: int) -> None:
    files.read_ahead(most)
    ahead = min(most, PIECE_BYTES)  # a piece holds the largest of them
    assert files.reader.staging_bytes == NUM_PIECES * PIECE_BYTES + PAGE + ahead
