"""``ds-finepage report`` and ``trace``: on a small folder, and on everything that is none."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ds_finepage.cli import main
from ds_finepage.graph import codec
from ds_finepage.reporting import drawing
from ds_finepage.reporting.page import PAGE_FILE
from ds_finepage.reporting.results import RESULTS_FILE, run_folder, save_results
from tests.integration.cli.models import small_model
from tests.unit.reporting.folders import RESULTS, SETTINGS, make_folder, planned

COMMANDS = pytest.mark.parametrize("command", ["report", "trace"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "results")


def test_a_report(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "png", lambda figure: b"picture")
    assert main(["report", str(folder)]) == 0
    assert str(folder / PAGE_FILE) in capsys.readouterr().out
    text = (folder / PAGE_FILE).read_text()
    assert "Batch 1, decode step: finepage is fastest" in text
    assert "There are no pictures of other policies" in text  # the model is not there
    names = {path.stem for path in (folder / "figures").iterdir()}
    assert {"arms_b1", "finepage_b1_decode_memory"} <= names


def test_a_trace_of_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(folder)]) == 0
    assert main(["trace", str(folder)]) == 0  # it follows from the folder, so it is replaced
    path = folder / "trace.json"
    assert f"trace: {path}; open it with https://ui.perfetto.dev" in capsys.readouterr().out
    events = json.loads(path.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["finepage_b1 decode, predicted", "finepage_b1 decode, measured"]
    counters = [e for e in events if e["ph"] == "C"]
    assert {e["pid"] for e in counters} == {1, 2}
    assert max(sum(e["args"].values()) for e in counters) <= 5 * 64


def test_a_trace_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "plan.trace.json"
    codec.save_plan(planned().memgraph, plan)
    assert main(["trace", str(plan)]) == 2
    assert "Name the machine with --hardware" in capsys.readouterr().err
    arguments = ["trace", str(plan), "--hardware", "v100-16gb"]
    assert main(arguments) == 0
    events = json.loads(out.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert sum(e["dur"] for e in spans) * 1000 == pytest.approx(
        sum(s.end_ns - s.start_ns for s in planned().timeline.spans)
    )
    assert main(arguments) == 0  # it follows from the plan, so it is replaced


def test_the_trace_of_a_written_plan_is_the_predicted_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, trace = tmp_path / "plan.json", tmp_path / "plan.trace.json"
    model = str(small_model(tmp_path))
    arguments = ["plan", "--model", model, "--seq", "64", "--hardware", "t4"]
    arguments += ["--device-budget", "60%weights", "--out", str(plan), "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(["check", str(plan)]) == 0
    assert main(["trace", str(plan), "--hardware", "t4"]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} >= {"compute", "h2d"}
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(found["predicted_ns"] / 1000)
    assert all(e["pid"] == 1 and e["ts"] >= 0 and e["dur"] >= 0 and e["name"] for e in spans)
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"compute", "h2d", "d2h"}


@COMMANDS
def test_a_folder_without_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert str(tmp_path / RESULTS_FILE) in capsys.readouterr().err


@COMMANDS
def test_a_folder_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, str(tmp_path / "none")]) == 2
    error = capsys.readouterr().err
    assert "cannot read" in error and error.count(str(tmp_path)) == 1
    assert "ds-finepage compare --out DIR" in error


@COMMANDS
def test_a_folder_of_another_version(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = folder / RESULTS_FILE
    path.write_text(path.read_text().replace('"format": 4', '"format": 0'))
    assert main([command, str(folder)]) == 2
    assert "of this version of ds_finepage: format: " in capsys.readouterr().err


@COMMANDS
def test_a_damaged_plan(folder: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    path = run_folder(folder, "finepage_b1") / "decode.plan.json"
    path.write_text(path.read_text()[:400])
    assert main([command, str(folder)]) == 1
    assert str(path) in capsys.readouterr().err
    assert not (folder / PAGE_FILE).exists()


def test_a_trace_of_runs_without_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_results(replace(RESULTS, runs=RESULTS.runs[:2]), tmp_path)
    assert main(["trace", str(tmp_path)]) == 2
    assert "has no plan of a pass" in capsys.readouterr().err


def test_a_report_without_its_packages(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["report", str(folder)]) == 2
    assert "pip install 'ds_finepage[report]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [(["--points", "-1"], "--points: -1 is negative")],
)
def test_options_that_cannot_be_used(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["report", str(folder), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / PAGE_FILE).exists()


def test_the_picture_of_budgets_captures_the_model_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "png", lambda figure: b"picture")
    settings = replace(SETTINGS, model=str(small_model(tmp_path)), device_budget="70%weights")
    folder = make_folder(tmp_path / "results", replace(RESULTS, settings=settings))
    assert main(["report", str(folder), "--points", "1"]) == 0
    assert (folder / "figures" / "budgets_b1.png").exists()
    assert (folder / "figures" / "finepage_b1_decode_policies.png").exists()
    text = (folder / PAGE_FILE).read_text()
    assert "There are no pictures" not in text
