"""The probe: which figures it finds, and how it makes them of times."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ds_finepage.execution import probe
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
