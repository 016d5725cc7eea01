"""Two ranks load checkpoints, each its own shard; ``shard_worker.py`` is a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_ranks import found_on
from tests.integration.peaks import HAS_PEAKS, make_large

WORKER = Path(__file__).with_name("shard_worker.py")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Make a large checkpoint where its load can be measured; return the folder, and its bytes."""
    folder = tmp_path_factory.mktemp("shards")
    return folder, make_large("mixtral", folder) if HAS_PEAKS else 0


@pytest.fixture(scope="module")
def ranks(checkpoints: tuple[Path, int], environment: dict[str, str]) -> list[dict[str, Any]]:
    folder, _ = checkpoints
    return found_on(2, "load", folder, environment, WORKER)


def test_masters_are_those_of_a_model_that_was_loaded_whole(ranks: list[dict[str, Any]]) -> None:
    for found in (each["values"] for each in ranks):
        assert len(found) == 4
        assert all(each["names"] and not each["different"] for each in found.values())
        assert found["llama"]["tokens"] and found["llama"]["unplanned"] == 0


@pytest.mark.skipif(not HAS_PEAKS, reason="needs Linux's /proc")
def test_host_bytes_of_each_rank_stay_within_a_tenth_of_its_masters(
    checkpoints: tuple[Path, int], ranks: list[dict[str, Any]]
) -> None:
    _, num_bytes = checkpoints
    for peak_bytes, own_bytes in ((r["bytes"]["peak"], r["bytes"]["masters"]) for r in ranks):
        assert own_bytes < 1.01 * peak_bytes  # the masters themselves were seen
        assert peak_bytes <= 1.1 * own_bytes
        assert own_bytes < num_bytes  # it holds its shard alone
