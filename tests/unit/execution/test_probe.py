"""The probe: which figures it finds, and how it makes them of times."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finepage.errors import ConfigError, StoreError
from ds_finepage.execution import probe
from ds_finepage.execution.disk import FileRange, FileReader
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.graph.profiles import load_profile, require_usable

CPU = torch.device("cpu")
MIB = 1 << 20


def test_a_probe_finds_every_rate() -> None:
    for scratch_bytes in (1, 4 * MIB):
        assert require_usable(probe.probe(CPU, scratch_bytes=scratch_bytes)).source


def test_the_rate_of_a_link_is_net_of_the_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    took, repeated = iter([17e-6, 9e-6, 1.5e-6, 1.5e-6]), []

    def seconds_of(_: object, __: object, *, repeats: int) -> float:
        repeated.append(repeats)
        return next(took)

    monkeypatch.setattr(probe, "seconds_of", seconds_of)
    found = probe._links(2 * MIB, CPU, 1e-6)
    assert found["h2d_bytes_per_s"] == pytest.approx(2 * MIB / 16e-6)
    assert found["d2h_bytes_per_s"] == pytest.approx(2 * MIB / 8e-6)
    # Half of the time counts at least, however long the latency is.
    assert probe._links(16, CPU, 1e-6)["h2d_bytes_per_s"] == pytest.approx(16 / 0.75e-6)
    assert min(repeated) > 10  # the first ten may wait for a thread


@pytest.mark.parametrize(
    ("rate", "scratch_bytes", "sizes"),
    [
        (1e9, 16 * MIB, [64, 128]),  # long enough
        (1e13, 16 * MIB, [64, 128, 256, 512]),  # the largest on a CPU
        (1e13, 3 * 256 * 256 * 4, [64, 128, 256]),  # no more room
    ],
)
def test_products_grow_until_one_takes_long_enough(
    monkeypatch: pytest.MonkeyPatch, rate: float, scratch_bytes: int, sizes: list[int]
) -> None:
    found = []

    def seconds(product: partial[torch.Tensor], device: torch.device) -> float:
        found.append(product.args[0].shape[0])
        return 2 * found[-1] ** 3 / rate

    monkeypatch.setattr(probe, "seconds_of", seconds)
    assert probe._matmul_rate(torch.float32, CPU, scratch_bytes) == pytest.approx(rate)
    assert found == sizes


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # flags() sets that as well
def test_the_slowest_dtype_is_the_rate_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    took = iter([1.0, 2.0, 3.0, 4.0, 0.1, 10.0])  # by one row and by 16, dtype after dtype

    def seconds(run: partial[None], device: torch.device, *, is_issued: bool) -> float:
        rows, matrix, out = run.args
        assert is_issued and out.shape == (rows.shape[0], matrix.shape[1])
        assert 0 < float(rows[0, 0]) < 2 and float(rows[-1, -1]) == float(rows[0, 0])
        with torch.backends.mkldnn.flags(enabled=False):  # on some CPUs it copies the matrix
            run()
        return next(took)

    monkeypatch.setattr(probe, "seconds_of", seconds)
    monkeypatch.setattr(probe, "HOST_BYTES", num_bytes := 64 * 4 * probe.HOST_WIDTH)
    known = load_profile("t4")
    with DeviceMeter(CPU) as meter:
        found = probe.with_measured_host(known, CPU, scratch_bytes=64)
    assert meter.peak_bytes < num_bytes // 4  # what it multiplies by is no memory of the device
    assert found.host_bytes_per_s == pytest.approx(num_bytes / 3)
    assert found.host_flops_per_s == pytest.approx(2 * 16 * num_bytes / 2 / 10)
    assert found.has_host and not known.has_host
    assert found.without_host == known


T4 = load_profile("t4")


def probed(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[FileRange]:
    """Probe a disk by a file; return what was read, until 0.5 s were over."""
    reads, clock = list[FileRange](), iter([10.0, 10.5])
    copy = FileReader.copy

    def noted(reader: FileReader, source: FileRange, target: torch.Tensor) -> None:
        copy(reader, source, target)
        reads.append(source)

    monkeypatch.setattr(FileReader, "copy", noted)
    monkeypatch.setattr(probe, "DISK_BYTES", 3 * MIB)
    monkeypatch.setattr(probe.time, "perf_counter", lambda: next(clock))
    found = probe.with_measured_disk(T4, CPU, path)
    assert found.disk_bytes_per_s == reads[-1].nbytes / 0.5
    assert replace(found, disk_bytes_per_s=T4.disk_bytes_per_s) == T4
    return reads


@pytest.mark.parametrize("nbytes", [2 * MIB, 4 * MIB])
def test_the_begin_of_a_file_is_read(
    nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(nbytes))
    first, measured = probed(path, monkeypatch)
    assert first.nbytes == 1  # before the clock runs: it takes the memory
    assert (measured.path, measured.offset) == (str(path), 0)
    assert measured.nbytes == min(nbytes, 3 * MIB)


def test_a_file_in_the_page_cache_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advice = list[Any]()
    monkeypatch.setattr(os, "posix_fadvise", lambda *given: advice.append(given[1:]))
    path = tmp_path / "file"
    path.write_bytes(b"bytes")
    probed(path, monkeypatch)
    assert (0, 0, os.POSIX_FADV_DONTNEED) in advice


@pytest.mark.parametrize("name", ["gone", "empty", "."])
def test_what_is_no_file_with_bytes_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=r"--disk: .* is no file with bytes in it"):
        probe.with_measured_disk(T4, CPU, tmp_path / name)


def test_a_file_that_cannot_be_read_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / "file").write_bytes(b"bytes")
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StoreError, match="cannot be read"):
        probe.with_measured_disk(T4, CPU, tmp_path / "file")
