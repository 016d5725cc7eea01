"""``ds-finepage compare --arms all`` on a small model, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.cli import main
from ds_finepage.compare.arms import ARMS
from ds_finepage.compare.checkpoint import make_checkpoint
from ds_finepage.reporting.results import LOG_FILE, load_passes, run_folder
from tests.e2e.conftest import finepage, tiny_config

OPTIONS = ("--device-budget", "90%weights", "--prompt", "8", "--new", "5", "--repeats", "1")


def command(model: Path, out: Path, *options: str) -> list[str]:
    return ["compare", "--model", str(model), "--out", str(out), *OPTIONS, *options]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, tiny_config(folder), num_layers=2)
    return folder


@pytest.fixture(scope="module")
def compared(
    model: Path, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> tuple[Path, dict[str, Any]]:
    """Run every arm; return the folder, and the runs by arm."""
    out = tmp_path_factory.mktemp("compared") / "out"
    done = finepage(*command(model, out, "--arms", "all", "--json"), environment=environment)
    return out, {found["arm"]: found for found in json.loads(done.stdout)["runs"]}


def test_every_arm_ran_with_the_same_tokens(compared: tuple[Path, dict[str, Any]]) -> None:
    _, runs = compared
    assert list(runs) == list(ARMS)
    for name in ARMS:
        assert (name, runs[name]["reason"], runs[name]["tokens_equal"]) == (name, None, True)


def test_stock_copies_what_is_simulated(compared: tuple[Path, dict[str, Any]]) -> None:
    _, runs = compared
    for name in (name for name in ARMS if name.startswith("zero")):
        for phase in (runs[name]["prefill"], runs[name]["decode"]):
            assert phase["h2d_bytes"] == phase["modelled_h2d_bytes"] > 0, name


def test_ours_holds_the_budget_and_the_published_algorithm_copies_weights_back(
    compared: tuple[Path, dict[str, Any]],
) -> None:
    out, runs = compared
    for name, arm in ARMS.items():
        if arm.observes:
            assert runs[name]["peak_bytes"] <= runs[name]["budget_bytes"], name
            passes = {found.name for found in load_passes(run_folder(out, f"{name}_b1"))}
            assert {"prefill", "decode"} <= passes, name
    assert runs["finepage"]["decode"]["d2h_bytes"] == 0
    assert runs["horizon-published"]["decode"]["d2h_bytes"] > 0
    assert (run_folder(out, "finepage_b1") / LOG_FILE).stat().st_size > 0


def test_a_finished_comparison_is_only_shown_again(
    model: Path, compared: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, runs = compared
    assert main(command(model, out, "--arms", "all", "--json", "--resume")) == 0
    assert [found["arm"] for found in json.loads(capsys.readouterr().out)["runs"]] == list(runs)
