from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ds_finepage.cli import probe
from ds_finepage.execution import disk
from ds_finepage.graph.profiles import load_profile
from tests.commands import Cli
from tests.integration.cli.models import NUM_PARAMETERS

PROBE = ["probe", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _little_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SCRATCH_BYTES", 2 << 20)


def test_the_profile_is_one_that_plan_takes(model: str, tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "my.json"
    out = cli(*PROBE, "--out", path).out
    assert str(path) in out and "ds-finepage plan" in out
    assert load_profile(path).name == "cpu"
    plan = ["plan", "--model", model, "--seq", "8", "--hardware", path]
    assert cli.json(*plan, "--device-budget", "8MiB")["hardware"] == "cpu"


def test_plan_reads_weights_at_the_rate_of_the_disk(
    model: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file = tmp_path / "my.json", tmp_path / "weights"
    file.write_bytes(bytes(4 << 20))
    cli(*PROBE, "--disk", file, "--out", path)
    assert load_profile(path).disk_bytes_per_s > 1e6
    monkeypatch.setattr(disk, "PIECE_BYTES", 1 << 12)
    plan = ["plan", "--model", model, "--seq", "8", "--hardware", path, "--no-split"]
    budgets = ["--device-budget", "40%weights", "--host-memory", NUM_PARAMETERS]
    assert cli.json(*plan, *budgets)["file_bytes"] > 0
    cli.refuses(*PROBE, "--disk", tmp_path / "gone", says="--disk: ")


def test_without_a_file_it_is_printed(cli: Cli) -> None:
    assert json.loads(cli(*PROBE).out)["kind"] == "hardware_profile"


def test_no_file_is_overwritten(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "my.json"
    path.write_text("mine")
    cli.refuses(*PROBE, "--out", path, says="--force")
    assert path.read_text() == "mine"
    cli(*PROBE, "--out", path, "--force")
    assert load_profile(path).name == "cpu"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--device", "gpu0"], "--device: 'gpu0' is not a device"),
        (["--device", "meta"], "cannot be used"),
        (["--out", "/no/such/folder/my.json"], "there is no folder"),
    ],
)
def test_bad_options(changes: list[str], words: str, cli: Cli) -> None:
    cli.refuses(*PROBE, *changes, says=words)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_device_that_is_not_there(cli: Cli) -> None:
    cli.refuses(*PROBE, "--device", "cuda", says="torch sees no accelerator")


@pytest.mark.gpu
def test_a_gpu(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "gpu.json"
    cli("probe", "--device", "cuda", "--out", path)
    found = load_profile(path)
    assert found.h2d_bytes_per_s > 1e9
    assert found.flops_per_s["float16"] > found.flops_per_s["float32"]
