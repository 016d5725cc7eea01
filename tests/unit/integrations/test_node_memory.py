"""Weights that two ranks of one machine have in memory once; threads stand for the ranks."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from ds_finepage.integrations.deepspeed import node_memory
from ds_finepage.integrations.deepspeed.node_memory import shared

pytestmark = pytest.mark.skipif(node_memory.node() is None, reason="needs Linux")

SIZES = (1000, 3, 0, 500, 70)
DTYPES = (torch.float32, torch.bfloat16)


class Ranks:
    """Lets threads gather values."""

    def __init__(self, num_ranks: int) -> None:
        self.values: list[Any] = [None] * num_ranks
        self.barrier = Barrier(num_ranks, timeout=20)

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


def run(num_ranks: int) -> tuple[list[list[torch.Tensor]], list[tuple[int, int]]]:
    reads: list[tuple[int, int]] = []
    ranks = Ranks(num_ranks)
    like = [torch.empty(n, dtype=DTYPES[i % 2], device="meta") for i, n in enumerate(SIZES)]

    def one(rank: int) -> list[torch.Tensor]:
        def read(i: int, target: torch.Tensor) -> None:
            reads.append((rank, i))
            target.copy_(torch.arange(len(target)) + i)

        return shared(like, read, rank, partial(ranks.gather, rank))

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(one, range(num_ranks))), reads


def require_values(found: list[torch.Tensor]) -> None:
    for i, (size, tensor) in enumerate(zip(SIZES, found, strict=True)):
        assert torch.equal(tensor, (torch.arange(size) + i).to(tensor.dtype))


def test_each_weight_is_read_by_one_rank_for_all() -> None:
    num_files = len(os.listdir("/proc/self/fd"))
    found, reads = run(2)
    assert sorted(i for _, i in reads) == list(range(len(SIZES)))
    assert {rank for rank, _ in reads} == {0, 1}
    for each in found:
        require_values(each)
    assert len(os.listdir("/proc/self/fd")) == num_files


def test_a_rank_that_writes_changes_its_own_copy() -> None:
    (mine, others), _ = run(2)
    for tensor in mine:
        tensor.add_(1)
    require_values(others)
    assert mine[0][0] == 1


def test_a_page_is_in_memory_once() -> None:
    """Both ranks map the same file, each in private."""
    before = maps()
    found, _ = run(2)
    new = maps() - before
    assert len(new) == 2
    assert len({line.split()[4] for line in new}) == 1
    assert all("p" in line.split()[1] for line in new)
    del found


def maps() -> set[str]:
    """Return this process's maps of such files."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line for line in lines if "memfd:ds_finepage" in line}


@pytest.mark.parametrize("name", (None, "alone"))
def test_a_rank_without_neighbours_reads_all(
    name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = iter(("here", "there")) if name else iter((None, None))
    monkeypatch.setattr(node_memory, "node", lambda: next(names))
    found, reads = run(2)
    assert len(reads) == 2 * len(SIZES)
    for each in found:
        require_values(each)


def test_a_system_without_such_files_has_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    assert node_memory.node() is None
    monkeypatch.undo()
    monkeypatch.setattr(os, "readlink", lambda _: (_ for _ in ()).throw(OSError()))
    assert node_memory.node() is None
