"""The day on a GPU (benchmarks/gpu_day.py), rehearsed in tiny sizes; and steps that go wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BENCHMARKS, Script
from tests.device import loading

EMIT = """
import json, pathlib, sys, time
def row(**cells):
    print("gpu_day row: " + json.dumps(cells), flush=True)
"""


@pytest.fixture(scope="module")
def gpu_day(script: Script) -> Any:
    return script("gpu_day")


@pytest.fixture(scope="module")
def options() -> list[str]:
    """Choose the test device; where it cannot be compiled, the CPU."""
    if loading.why_not() is not None:
        return ["--device", "cpu"]
    return ["--device", "slowcard", "--load", "tests.device.loading:load"]


EACH_SCRIPT = "machine;small run;kernel;link;engines, tiny;enqueue, graphs"
"""The other steps run these scripts with other options, and tests that run here as they are."""


def test_the_rehearsal_ends_and_reports_every_step(
    gpu_day: Any, options: list[str], tmp_path: Path
) -> None:
    status = gpu_day.main(["--out", str(tmp_path), "--tiny", "--only", EACH_SCRIPT, *options])
    (written,) = tmp_path.glob("gpu_day_*.json")
    steps = {step["name"]: step for step in json.loads(written.read_text())["steps"]}
    text = written.with_suffix(".md").read_text()
    assert status == 0, text
    assert {s["status"] for s in steps.values()} == {"ok"} and len(steps) == 6
    (row,) = steps["small run"]["rows"]
    assert row["tokens_equal"] and row["within_budget"] and row["host_waits"] == "never"
    forms = [row for row in steps["kernel"]["rows"] if "agrees" in row]
    assert len(forms) == 2 * 2 * 3 and all(row["agrees"] for row in forms)
    engines = [row for row in steps["engines, tiny"]["rows"] if row["table"] == "engines"]
    arms = [(row["engine"], row["budget"]) for row in engines if row.get("tokens_equal")]
    budgets = ("50%", "100%")
    assert arms == [
        ("plain transformers", "none"),
        *(("ds_finepage", budget) for budget in budgets),
        ("ds_finepage under DeepSpeed", "50%"),
        *(("stock ZeRO-Inference", b) for b in ("default", "least prefetch", *budgets)),
    ]
    for row in engines:
        if row["engine"].startswith("ds_finepage"):
            assert row["within_budget"] and row["step_h2d_bytes"] > 0
        elif row["budget"] == "least prefetch":
            assert row["step_h2d_bytes"] == steps["engines, tiny"]["rows"][0]["weights_bytes"]
    plans = [row for row in steps["engines, tiny"]["rows"] if row["table"] == "plans"]
    assert len(plans) == 2 * 3 and all(row["h2d_over_bound"] >= 1 for row in plans)
    assert [row["graphs"] for row in steps["enqueue, graphs"]["rows"]] == [True]
    (enqueue,) = steps["enqueue, graphs"]["rows"]
    assert enqueue["ds_finepage_us_a_task"] > 0 and enqueue["pytorch_us_a_task"] > 0
    assert str(BENCHMARKS.parent) not in text + written.read_text()
    assert sys.prefix not in text + written.read_text()


RunScripts = Callable[..., tuple[Any, str]]


@pytest.fixture
def run_scripts(gpu_day: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunScripts:
    """Runs steps of the given Python texts; returns the report and its Markdown."""
    monkeypatch.setattr(gpu_day, "HERE", tmp_path)

    def run(**scripts: str) -> tuple[Any, str]:
        steps = []
        for name, text in scripts.items():
            (tmp_path / f"{name}.py").write_text(EMIT + text)
            limit_s = 1 if name == "hangs" else 60
            steps.append(gpu_day.Step(name=name, limit_s=limit_s, words=(f"{name}.py",)))
        options = gpu_day.parse(["--out", str(tmp_path / "out"), "--device", "cpu"])
        report = gpu_day.run_day(options, steps)
        return report, report.path("md").read_text()

    return run


def test_a_step_that_fails_hangs_or_dies_never_stops_the_next(run_scripts: RunScripts) -> None:
    report, text = run_scripts(
        fails="row(table='t', first=1)\nraise ValueError('no such file: /home/me/model.bin')",
        dies="import os, signal\nrow(table='t', first=2)\nos.kill(os.getpid(), signal.SIGSEGV)",
        hangs="import signal\nrow(table='t', first=3)\nsignal.pause()",
        leaves_a_child="import subprocess\n"
        "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "row(table='t', first=4)",
        works="row(table='t', first=5)",
    )
    found = [(o.name, o.status, [row["first"] for row in o.rows]) for o in report.outcomes]
    assert found == [
        ("fails", "failed", [1]),
        ("dies", "failed", [2]),
        ("hangs", "over its limit", [3]),
        ("leaves_a_child", "ok", [4]),
        ("works", "ok", [5]),
    ]
    assert report.outcomes[0].remark == "ValueError: no such file: model.bin"
    assert report.outcomes[2].remark == "killed after 1 s"
    assert "| hangs | over its limit |" in text and "| works | ok |" in text


def test_rows_are_in_the_files_while_their_step_still_runs(run_scripts: RunScripts) -> None:
    report, _ = run_scripts(
        waits="row(table='t', first='a row that was written early')\n"
        "out = pathlib.Path(__file__).parent / 'out'\n"
        "while not any('written early' in p.read_text() for p in out.glob('*.json')): pass"
    )
    assert report.outcomes[0].status == "ok"


@pytest.mark.parametrize(
    "cells",
    [
        {"tokens_equal": False},
        {"engine": "ds_finepage", "within_budget": False},
        {"remark": "PlanInfeasibleError: too small"},
    ],
)
def test_a_row_that_tells_of_a_fault_fails_its_step(
    run_scripts: RunScripts, cells: dict[str, Any]
) -> None:
    text = f"row(table='engines', **{cells!r})\nrow(table='engines', tokens_equal=True)"
    report, _ = run_scripts(engines=text)
    (outcome,) = report.outcomes
    assert outcome.status == "failed" and outcome.remark == "1 of 2 rows tell of a fault"


def test_a_kernel_that_disagrees_fails(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = script("day_kernel")
    monkeypatch.setattr(sys, "argv", ["day_kernel.py", "--device", "cpu", "--tiny"])
    assert kernel.main() == 0
    plain = kernel.packed_linear
    monkeypatch.setattr(kernel, "packed_linear", lambda *a: plain(*a) * (1.1 if a[-1] else 1))
    assert kernel.main() == 1


def test_every_stage_ends_within_its_limit(gpu_day: Any) -> None:
    for is_tiny in (False, True):
        steps = [step for step in gpu_day.STEPS if step.is_tiny in (None, is_tiny)]
        for stage, most_seconds in gpu_day.STAGES.items():
            seconds = [step.limit_s for step in steps if step.stage == stage]
            assert 0 < sum(seconds) <= most_seconds - 2 * len(seconds)
    assert sum(gpu_day.STAGES.values()) <= 15 * 60 and gpu_day.STAGES["smoke"] <= 3 * 60
    assert {step.stage for step in gpu_day.STEPS} == set(gpu_day.STAGES)
    assert {step.words[0] for step in gpu_day.STEPS} <= {p.name for p in BENCHMARKS.glob("*.py")}


def test_a_later_call_goes_on_where_an_earlier_one_ended(
    gpu_day: Any, run_scripts: RunScripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = "row(table='t', first=time.time_ns())"
    tests = """
passed = json.loads(__import__("os").environ["GPU_DAY_PASSED"])
for name in {"a", "b"} - set(passed):
    row(table="tests", test=name, outcome="passed" if passed or name == "a" else "failed")
sys.exit(not passed)
"""
    first, _ = run_scripts(works=works, tests=tests)
    assert [o.status for o in first.outcomes] == ["ok", "failed"]
    second, _ = run_scripts(works=works, tests=tests)
    assert [o.status for o in second.outcomes] == ["ok", "ok"]
    assert second.outcomes[0].rows == first.outcomes[0].rows
    assert [row["test"] for row in second.outcomes[1].rows] == ["a", "b"]
    monkeypatch.setattr(gpu_day, "earlier_of", None)  # which --again does not ask for
    options = gpu_day.parse(["--out", str(tmp_path / "out"), "--device", "cpu", "--again"])
    step = gpu_day.Step(name="works", limit_s=60, words=("works.py",))
    assert gpu_day.run_day(options, [step]).outcomes[0].rows != first.outcomes[0].rows


def test_tests_that_passed_before_are_not_run_again(script: Script, tmp_path: Path) -> None:
    tests = script("day_tests")
    (tmp_path / "test_x.py").write_text("def test_a(): raise SystemExit\ndef test_b(): pass\n")
    rows: list[dict[str, Any]] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(tests, "hand_over", lambda table, **row: rows.append(row))
        plugin = tests.Results(float("inf"), ["test_x.py::test_a"])
        options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--import-mode=importlib"]
        assert pytest.main([*options, str(tmp_path)], plugins=[plugin]) == 0
    assert [(row["test"], row["outcome"]) for row in rows] == [("test_x.py::test_b", "passed")]


def test_steps_can_be_chosen_by_name(gpu_day: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", "x", "--only", "link; engines, 7B"]
    assert [step.name for step in gpu_day.parse(words).steps] == ["link", "engines, 7B"]
    with pytest.raises(SystemExit) as error:
        gpu_day.parse(["--out", "x", "--only", "lunch"])
    assert error.value.code == 2
    assert "there is no step 'lunch'; the steps are machine; small run;" in capsys.readouterr().err
