"""Ranks on one machine, over gloo: each runs its shard by plan, as ``rank_worker.py`` says."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.units import format_bytes

WORKER = Path(__file__).with_name("rank_worker.py")
FAMILIES = ("llama", "qwen3", "opt")
SECONDS = 600
"""A limit for what takes a minute or two, so that ranks that wait for each other end."""


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
FORKED = (sys.executable, str(Path(__file__).with_name("forked.py")))


def found_on(
    num_ranks: int, mode: str, folder: Path, environment: dict[str, str], worker: Path = WORKER
) -> list[dict[str, Any]]:
    """Start ranks, and return what each has found."""
    launch([*FORKED, str(num_ranks), free_port()], mode, folder, environment, worker)
    return [found_by(rank, folder) for rank in range(num_ranks)]


def launch(
    command: list[str], mode: str, folder: Path, environment: dict[str, str], worker: Path = WORKER
) -> int:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [*command, str(worker), mode, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if mode != "killed":
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.returncode


def found_by(rank: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"rank{rank}.json").read_text())
    return found


@pytest.fixture(scope="module")
def ranks(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> list[dict[str, Any]]:
    return found_on(2, "all", tmp_path_factory.mktemp("ranks"), environment)


def check_family(found: dict[str, Any]) -> None:
    """Hold what a rank has found about one family against plain transformers and the forecast."""
    assert (found["unplanned"], found["num_unplanned"]) == ([], 0)
    assert min(found["link"]) > 0
    assert set(found["budgets"]) == {"0.7", "0.0", "1.0"}
    for each in found["budgets"].values():
        assert each["tokens"]
        assert each["distance"] <= 2 * found["stock"]
    weight_bytes, collectives = found["forecast"]
    assert weight_bytes == found["weight_bytes"]
    assert collectives and all(each == collectives for each in found["collectives"])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shard_runs_by_plan_under_every_budget(ranks: list[dict[str, Any]], family: str) -> None:
    for each in ranks:
        check_family(each[family])


def test_four_ranks_run_experts_under_every_budget(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    for found in found_on(4, "experts", tmp_path, environment):
        check_family(found)


def test_two_nodes_with_a_rank_each_run_by_plan(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Both are on this machine; each has a launcher of its own, as the documents say."""
    at = ["--master_addr", "127.0.0.1", "--master_port", free_port()]
    at += ["--nproc_per_node", "1", "-m", "ds_finepage.run"]
    nodes = [[*TORCHRUN, "--nnodes", "2", "--node_rank", node, *at] for node in "01"]
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(launch, node, "one", tmp_path, environment) for node in nodes]
        assert [job.result() for job in jobs] == [0, 0]
    found = [found_by(rank, tmp_path) for rank in (0, 1)]
    for each in found:
        assert (each["unplanned"], each["num_unplanned"]) == ([], 0)
        assert min(each["link"]) > 0
        assert each["budgets"]["0.7"]["tokens"]
        assert each["budgets"]["0.7"]["distance"] <= 2 * each["stock"]
        assert each["forecast"][1] == each["collectives"][0]
        assert each["table"] == found[0]["table"]
        assert format_bytes(each["weight_bytes"]) in each["table"]
    assert found[0]["forecast"][0] == found[0]["weight_bytes"]


SETUPS = {
    "other budgets": "RankError: The ranks differ in finepage.device_budget: rank 0 has "
    "'70%weights', rank 1 has '60%weights'.",
    "more than there are": "there are 2, and tensor_parallel.autotp_size is 3. Set it to 2",
    "cannot be cut": "AutoTP cannot cut GPT2LMHeadModel over the ranks: ",
}


@pytest.mark.parametrize("setup", SETUPS)
@pytest.mark.parametrize("rank", (0, 1))
def test_a_setup_that_cannot_run_is_refused_on_every_rank(
    ranks: list[dict[str, Any]], rank: int, setup: str
) -> None:
    assert SETUPS[setup] in ranks[rank]["setups"][setup]


def test_ranks_that_differ_before_a_pass_stay_in_step(ranks: list[dict[str, Any]]) -> None:
    for found in (each["out of step"] for each in ranks):
        assert found["other tokens"].startswith("RankError: The ranks differ in integer inputs: ")
        assert found["no room"].startswith("PlanInfeasibleError: ")
        assert found["in step"] == ""
    assert ranks[0]["out of step"]["no room"].startswith("PlanInfeasibleError: Rank 1 failed: ")


def test_an_exception_on_one_rank_ends_the_others(ranks: list[dict[str, Any]]) -> None:
    own, other = ranks[1]["out of step"], ranks[0]["out of step"]
    assert own["exception"] == "KeyError('of the user')"
    assert other["exception"] == "RankError: Rank 1 failed: KeyError('of the user')"
    assert own["in time"] and other["in time"]
    assert "Start all ranks again." in own["afterwards"]
    assert "Start all ranks again." in other["afterwards"]


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path, environment: dict[str, str]) -> None:
    assert launch([*FORKED, "2", free_port()], "killed", tmp_path, environment) != 0
    error = found_by(0, tmp_path)["error"]
    assert error.startswith("RankError: A pass ended in the middle: an all-reduce with the other")
