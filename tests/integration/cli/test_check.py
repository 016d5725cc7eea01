from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.cli.check import figures_of
from ds_finepage.planning.horizon import plan_horizon
from ds_finepage.planning.problem import Problem
from tests.commands import Cli
from tests.integration.engines import python
from tests.unit.planning.sketches import chain


@pytest.fixture
def asked(model: str) -> list[str]:
    shape = ["--seq", "64", "--hardware", "t4"]
    return ["plan", "--model", model, *shape, "--device-budget", "60%weights"]


@pytest.fixture
def plan_file(asked: list[str], tmp_path: Path, cli: Cli) -> Path:
    path = tmp_path / "a plan.json"
    assert f"ds-finepage check '{path}'\n" in cli(*asked, "--out", path).out
    return path


def test_the_figures_are_those_of_plan(plan_file: Path, asked: list[str], cli: Cli) -> None:
    expected, found = cli.json(*asked), cli.json("check", plan_file)
    for name in ("policy", "reloaded_bytes"):
        assert found[name] == expected[name] != 0
    assert 0 < found["peak_bytes"] < expected["peak_bytes"]  # the arena's part of it
    # An embedding brings in its rows, so the planned weights are fewer.
    assert 0 < found["weight_bytes"] <= expected["weight_bytes"]
    assert found["resident_bytes"] + found["reloaded_bytes"] >= found["weight_bytes"]
    assert found["num_compute"] == found["num_tasks"] >= expected["num_tasks"]


def test_a_certificate_has_bytes_bound_gap_and_peak(plan_file: Path, cli: Cli) -> None:
    found = cli.json("check", plan_file)
    assert 0 < found["lower_bound_bytes"] <= found["reloaded_bytes"]
    gap = found["reloaded_bytes"] / found["lower_bound_bytes"] - 1
    assert found["gap_share"] == round(gap, 6) >= 0
    assert found["peak_bytes"] <= found["arena_bytes"]
    printed = cli("check", plan_file).out
    for words in ("the plan is right", f"{gap:.2%}", "policy", "finepage", "MiB", "num reload"):
        assert words in printed


def without_edges(plan: dict[str, Any]) -> None:
    plan["edges"] = []


def without_its_taskgraph(plan: dict[str, Any]) -> None:
    del plan["graph"]


def of_another_version(plan: dict[str, Any]) -> None:
    plan["format"] = 99


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_edges, "no_data_edge"),
        (without_its_taskgraph, "graph: Field required"),
        (of_another_version, "99"),
    ],
)
def test_a_wrong_plan_is_refused(change: Any, words: str, plan_file: Path, cli: Cli) -> None:
    plan = json.loads(plan_file.read_text())
    change(plan)
    plan_file.write_text(json.dumps(plan))
    file = [] if change is without_edges else [str(plan_file)]
    cli.refuses("check", plan_file, says=[words, *file], status=1)


def test_a_missing_file_is_refused(tmp_path: Path, cli: Cli) -> None:
    cli.refuses("check", tmp_path / "none.json", says="cannot read")


def test_a_plan_is_verified_without_the_planner(plan_file: Path) -> None:
    code = (
        "import sys; from ds_finepage.cli import main; main(sys.argv[1:]); "
        "print(sorted(m for m in sys.modules if m.startswith('ds_finepage.planning.')))"
    )
    done = python(code, "check", plan_file)
    assert done.stdout.splitlines()[-1] == "['ds_finepage.planning.bounds']"


def test_weights_that_a_pass_finds_and_does_not_leave_count_as_reloaded() -> None:
    first = plan_horizon(Problem(chain(8), 6 * 64))
    second = plan_horizon(Problem(chain(8), 6 * 64, entry=first.exit))
    lost = set(second.entry) - set(second.exit)
    lost_bytes = sum(second.graph.buffers[r.buffer].nbytes for r in lost)
    assert figures_of(second)["reloaded_bytes"] == second.reloaded_bytes + lost_bytes > lost_bytes
    assert lost_bytes > 0
