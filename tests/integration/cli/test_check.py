from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.cli import main
from ds_finepage.cli.check import figures_of
from ds_finepage.planning.horizon import plan_horizon
from ds_finepage.planning.problem import Problem
from tests.integration.cli.models import small_model
from tests.unit.planning.sketches import chain


@pytest.fixture
def plan_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "a plan.json"
    model = str(small_model(tmp_path))
    arguments = ["--model", model, "--seq", "64", "--hardware", "t4", "--device-budget"]
    assert main(["plan", *arguments, "60%weights", "--out", str(path)]) == 0
    assert f"ds-finepage check '{path}'\n" in capsys.readouterr().out
    return path


def test_the_figures_are_those_of_plan(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(plan_file.parent / "small"), "--seq", "64", "--hardware", "t4"]
    assert main(["plan", *arguments, "--device-budget", "60%weights", "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)
    assert main(["check", str(plan_file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for name in ("policy", "reloaded_bytes", "num_memory_dependencies"):
        assert found[name] == expected[name] != 0
    # An embedding brings in its rows, so the planned weights are fewer.
    assert 0 < found["weight_bytes"] <= expected["weight_bytes"]
    assert found["resident_bytes"] + found["reloaded_bytes"] >= found["weight_bytes"]
    assert found["num_compute"] == found["num_tasks"] >= expected["num_tasks"]


def test_the_table(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(plan_file)]) == 0
    out = capsys.readouterr().out
    assert "policy" in out and "finepage" in out and "MiB" in out and "num reload" in out


def lines(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    graph, memgraph = map(json.loads, path.read_text().splitlines())
    return graph, memgraph


def test_a_wrong_plan_is_refused(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph, memgraph = lines(plan_file)
    memgraph["edges"] = []
    plan_file.write_text(json.dumps(graph) + "\n" + json.dumps(memgraph) + "\n")
    assert main(["check", str(plan_file)]) == 1
    assert "no_data_edge" in capsys.readouterr().err


def test_a_plan_without_its_taskgraph_is_refused(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, memgraph = lines(plan_file)
    plan_file.write_text(json.dumps(memgraph) + "\n")
    assert main(["check", str(plan_file)]) == 1
    message = capsys.readouterr().err
    assert str(plan_file) in message and "expected taskgraph" in message


def test_a_plan_of_another_version_is_refused(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    graph, memgraph = lines(plan_file)
    graph["format"] = 99
    plan_file.write_text(json.dumps(graph) + "\n" + json.dumps(memgraph) + "\n")
    assert main(["check", str(plan_file)]) == 1
    assert "99" in capsys.readouterr().err


def test_a_missing_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_a_certificate_has_bytes_bound_gap_and_peak(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(plan_file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["lower_bound_bytes"] <= found["reloaded_bytes"]
    gap = found["reloaded_bytes"] / found["lower_bound_bytes"] - 1
    assert found["gap_share"] == round(gap, 6) >= 0
    assert found["peak_bytes"] <= found["arena_bytes"]
    assert main(["check", str(plan_file)]) == 0
    printed = capsys.readouterr().out
    assert "the plan is right" in printed and f"{gap:.2%}" in printed


def test_a_plan_is_verified_without_the_planner(plan_file: Path) -> None:
    code = (
        "import sys; from ds_finepage.cli import main; main(sys.argv[1:]); "
        "print(sorted(m for m in sys.modules if m.startswith('ds_finepage.planning.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "check", str(plan_file)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "['ds_finepage.planning.bounds']"


def test_weights_that_a_pass_finds_and_does_not_leave_count_as_reloaded() -> None:
    first = plan_horizon(Problem(chain(8), 6 * 64))
    second = plan_horizon(Problem(chain(8), 6 * 64, entry=first.exit))
    lost = set(second.entry) - set(second.exit)
    lost_bytes = sum(second.graph.buffers[r.buffer].nbytes for r in lost)
    assert figures_of(second)["reloaded_bytes"] == second.reloaded_bytes + lost_bytes > lost_bytes
    assert lost_bytes > 0
