"""``ds-finepage report`` and ``trace``: on a small folder, and on everything that is none."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ds_finepage.graph import codec
from ds_finepage.reporting import drawing
from ds_finepage.reporting.page import PAGE_FILE
from ds_finepage.reporting.results import RESULTS_FILE, run_folder, save_results
from tests.commands import Cli
from tests.unit.reporting.folders import RESULTS, SETTINGS, make_folder, planned

COMMANDS = pytest.mark.parametrize("command", ["report", "trace"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "results")


def test_a_report(folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "png", lambda figure: b"picture")
    assert str(folder / PAGE_FILE) in cli("report", folder).out
    text = (folder / PAGE_FILE).read_text()
    assert "Batch 1, decode step: finepage is fastest" in text
    assert "There are no pictures of other policies" in text  # the model is not there
    names = {path.stem for path in (folder / "figures").iterdir()}
    assert {"arms_b1", "finepage_b1_decode_memory"} <= names


def test_a_trace_of_a_folder(folder: Path, cli: Cli) -> None:
    path = folder / "trace.json"
    for _ in range(2):  # it follows from the folder, so it is replaced
        said = cli("trace", folder)
    assert f"trace: {path}; open it with https://ui.perfetto.dev" in said.out
    events = json.loads(path.read_text())["traceEvents"]
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["finepage_b1 decode, predicted", "finepage_b1 decode, measured"]
    counters = [e for e in events if e["ph"] == "C"]
    assert {e["pid"] for e in counters} == {1, 2}
    assert max(sum(e["args"].values()) for e in counters) <= 5 * 64


def test_a_trace_of_a_plan(tmp_path: Path, cli: Cli) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "plan.trace.json"
    codec.save(planned().memgraph, plan)
    cli.refuses("trace", plan, says="Name the machine with --hardware")
    arguments = ["trace", str(plan), "--hardware", "v100-16gb"]
    cli(*arguments)
    events = json.loads(out.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert sum(e["dur"] for e in spans) * 1000 == pytest.approx(
        sum(s.end_ns - s.start_ns for s in planned().timeline.spans)
    )
    cli(*arguments)  # it follows from the plan, so it is replaced


def test_the_trace_of_a_written_plan_is_the_predicted_timeline(
    model: str, tmp_path: Path, cli: Cli
) -> None:
    plan, trace = tmp_path / "plan.json", tmp_path / "plan.trace.json"
    arguments = ["plan", "--model", model, "--seq", "64", "--hardware", "t4"]
    found = cli.json(*arguments, "--device-budget", "60%weights", "--out", plan)
    cli("check", plan)
    cli("trace", plan, "--hardware", "t4")
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["cat"] for event in spans} >= {"compute", "h2d"}
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(found["predicted_ns"] / 1000)
    assert all(e["pid"] == 1 and e["ts"] >= 0 and e["dur"] >= 0 and e["name"] for e in spans)
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {"compute", "h2d", "d2h"}


@COMMANDS
def test_a_folder_without_results(tmp_path: Path, cli: Cli, command: str) -> None:
    cli.refuses(command, tmp_path, says=str(tmp_path / RESULTS_FILE))
    error = cli(command, tmp_path / "none", status=2).err
    assert "cannot read" in error and error.count(str(tmp_path)) == 1
    assert "ds-finepage compare --out DIR" in error


def test_what_has_nothing_to_show_is_refused(
    tmp_path: Path, folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_results(replace(RESULTS, runs=RESULTS.runs[:2]), tmp_path)
    cli.refuses("trace", tmp_path, says="has no plan of a pass")
    cli.refuses("report", folder, "--points", "-1", says="--points: -1 is negative")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    cli.refuses("report", folder, says="pip install 'ds_finepage[report]'")
    assert not (folder / PAGE_FILE).exists()


@COMMANDS
def test_a_folder_of_another_version(folder: Path, cli: Cli, command: str) -> None:
    path = folder / RESULTS_FILE
    path.write_text(path.read_text().replace('"format": 5', '"format": 0'))
    cli.refuses(command, folder, says="of this version of ds_finepage: format: ")


@COMMANDS
def test_a_damaged_plan(folder: Path, cli: Cli, command: str) -> None:
    path = run_folder(folder, "finepage_b1") / "decode.plan.json"
    path.write_text(path.read_text()[:400])
    cli.refuses(command, folder, says=str(path), status=1)
    assert not (folder / PAGE_FILE).exists()


def test_the_picture_of_budgets_captures_the_model_again(
    model: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "png", lambda figure: b"picture")
    settings = replace(SETTINGS, model=model, device_budget="70%weights")
    folder = make_folder(tmp_path / "results", replace(RESULTS, settings=settings))
    cli("report", folder, "--points", "1")
    assert (folder / "figures" / "budgets_b1.png").exists()
    assert (folder / "figures" / "finepage_b1_decode_policies.png").exists()
    text = (folder / PAGE_FILE).read_text()
    assert "There are no pictures" not in text
