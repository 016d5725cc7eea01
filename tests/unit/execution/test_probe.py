"""The probe: which figures it finds, and how it makes them of times."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ds_finepage.execution import probe
from ds_finepage.graph.hardware import DETAILS
from ds_finepage.graph.profiles import require_usable

CPU = torch.device("cpu")
MIB = 1 << 20


def test_a_probe_finds_every_detail() -> None:
    found = require_usable(probe.probe(CPU, scratch_bytes=4 * MIB))
    assert [nbytes for nbytes, _ in found.copy_shares] == [128 << 10, 512 << 10, 2 * MIB]
    assert max(share for _, share in found.copy_shares) == 1.0


def test_little_scratch_gives_rates_alone() -> None:
    """Attaching a small model stays fast."""
    found = require_usable(probe.probe(CPU, scratch_bytes=MIB))
    assert {n: getattr(found, n) for n in DETAILS} == DETAILS


def test_a_rate_is_net_of_the_latency_and_a_share_is_of_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    took = {128 << 10: 3e-6, 512 << 10: 9e-6, 2 * MIB: 17e-6}
    monkeypatch.setattr(probe, "_copy_seconds", lambda target, source, nbytes: took[nbytes])
    found = probe._links(2 * MIB, CPU, 1e-6)
    assert found["h2d_bytes_per_s"] == pytest.approx(2 * MIB / 16e-6)
    assert found["d2h_bytes_per_s"] == pytest.approx(2 * MIB / 17e-6)
    assert [share for _, share in found["copy_shares"]] == pytest.approx([0.5, 0.5, 1.0])


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

    monkeypatch.setattr(probe, "_seconds", seconds)
    assert probe._matmul_rate(torch.float32, CPU, scratch_bytes) == pytest.approx(rate)
    assert found == sizes


def test_a_walk_returns_to_its_beginning_where_a_piece_does_not_fit() -> None:
    walk = probe.Walk(torch.arange(10))
    assert [walk.next(n).tolist() for n in (4, 4, 4, 2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [0, 1, 2, 3],
        [4, 5],
    ]
