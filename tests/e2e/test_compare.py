"""``ds-finepage compare --arms all`` on a small model, as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

from ds_finepage.compare.arms import ARMS
from ds_finepage.compare.checkpoint import make_checkpoint
from tests.e2e.conftest import finepage, tiny_config

OPTIONS = ("--device-budget", "90%weights", "--prompt", "8", "--new", "5", "--repeats", "1")


def test_every_arm_runs_with_the_same_tokens(tmp_path: Path, environment: dict[str, str]) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    make_checkpoint(model, tiny_config(tmp_path), num_layers=2)
    command = ["compare", "--model", str(model), "--out", str(out), "--arms", "all", "--json"]
    done = finepage(*command, *OPTIONS, environment=environment)
    runs = json.loads(done.stdout)["runs"]
    found = [(run["arm"], run["reason"], run["tokens_equal"]) for run in runs]
    assert found == [(arm, None, True) for arm in ARMS]
