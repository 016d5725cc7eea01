"""Two ranks load checkpoints, each its own shard; ``shard_worker.py`` is a rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_ranks import TORCHRUN, found_by, free_port, launch
from tests.integration.test_loading import make_large

WORKER = Path(__file__).with_name("shard_worker.py")


def of_ranks(mode: str, folder: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    torchrun = [*TORCHRUN, "--nproc_per_node", "2", "--master_port", free_port()]
    launch(torchrun, mode, folder, environment, WORKER)
    return [found_by(rank, folder) for rank in (0, 1)]


def test_masters_are_those_of_a_model_that_was_loaded_whole(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    for found in of_ranks("values", tmp_path, environment):
        assert len(found) == 4
        assert all(each["names"] and not each["different"] for each in found.values())
        assert found["llama"]["tokens"] and found["llama"]["unplanned"] == 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("name", ("mixtral",))
def test_host_bytes_of_all_ranks_stay_within_a_tenth_of_the_checkpoint(
    name: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    """A page that the ranks share counts for the rank that reads it, so the sum has it once."""
    num_bytes = make_large(name, tmp_path)
    found = of_ranks("bytes", tmp_path, environment)
    peak_bytes = sum(each["peak"] for each in found)
    assert num_bytes < 1.01 * peak_bytes  # the masters themselves were seen
    assert peak_bytes <= 1.1 * num_bytes
