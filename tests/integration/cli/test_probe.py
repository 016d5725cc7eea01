from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ds_finepage.cli import main, probe
from ds_finepage.graph.profiles import load_profile
from tests.integration.cli.models import small_model

PROBE = ["probe", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _little_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "SCRATCH_BYTES", 2 << 20)


def test_the_profile_is_one_that_plan_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.json"
    assert main([*PROBE, "--out", str(path)]) == 0
    out = capsys.readouterr().out
    assert str(path) in out and "ds-finepage plan" in out
    assert load_profile(path).name == "cpu"
    model = small_model(tmp_path)
    plan = ["plan", "--model", str(model), "--seq", "8", "--hardware", str(path), "--json"]
    assert main([*plan, "--device-budget", "8MiB"]) == 0
    assert json.loads(capsys.readouterr().out)["hardware"] == "cpu"


def test_without_a_file_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(PROBE) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "hardware_profile"


def test_no_file_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.json"
    path.write_text("mine")
    assert main([*PROBE, "--out", str(path)]) == 2
    assert "--force" in capsys.readouterr().err and path.read_text() == "mine"
    assert main([*PROBE, "--out", str(path), "--force"]) == 0
    assert load_profile(path).name == "cpu"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--device", "gpu0"], "--device: 'gpu0' is not a device"),
        (["--device", "meta"], "cannot be used"),
        (["--out", "/no/such/folder/my.json"], "there is no folder"),
    ],
)
def test_bad_options(changes: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PROBE, *changes]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PROBE, "--device", "cuda"]) == 2
    assert "torch sees no accelerator" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_gpu(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    assert main(["probe", "--device", "cuda", "--out", str(path)]) == 0
    found = load_profile(path)
    assert (
        found.h2d_bytes_per_s > 1e9 and found.flops_per_s["float16"] > found.flops_per_s["float32"]
    )
