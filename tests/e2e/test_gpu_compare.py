"""The comparison on a GPU (benchmarks/gpu_compare.py), rehearsed in tiny sizes on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BENCHMARKS, Script


@pytest.fixture(scope="module")
def gpu_compare(script: Script) -> Any:
    return script("gpu_compare")


def test_the_rehearsal_runs_every_arm_and_judges_it(
    gpu_compare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--out", str(tmp_path), "--device", "cpu", "--tiny", "--only", "tiny, all"]
    status = gpu_compare.main(words)
    (written,) = tmp_path.glob("gpu_compare_*.json")
    found = json.loads(written.read_text())
    text = written.with_suffix(".md").read_text()
    assert status == 0, text
    (step,) = found["steps"]
    arms = [row for row in step["rows"] if row["table"] == "arms"]
    both = ("50%", "100%")
    expected = {
        **dict.fromkeys(("plain", "zero"), ("none",)),
        **dict.fromkeys(("finepage", "finepage-horizon", "accelerate-map"), both),
        "zero-persistence": both,
    }
    by_arm = {arm: {r["budget"] for r in arms if r["engine"] == arm} for arm in expected}
    assert by_arm == {arm: set(budgets) for arm, budgets in expected.items()}
    for row in arms:
        if row["engine"] in expected:
            assert row["tokens_equal"] and row["peak_bytes"] > 0
    off = {row["engine"]: row["logits_off"] for row in arms if "logits_off" in row}
    assert off.keys() >= expected.keys() and not any(off.values())
    kept = [row for row in arms if row["engine"] == "zero-persistence"]
    assert all("stage3_model_persistence_threshold" in row["settings"] for row in kept)
    assert all(row["within_budget"] for row in arms if row["engine"] == "finepage")
    judged = {(r["target"], r["budget"]): r["met"] for r in found["judged"]}
    assert judged["peak / budget", "50%"] == judged["tokens are those of plain", "100%"] == "yes"
    assert "not run" not in judged.values()
    assert capsys.readouterr().out.rindex("| target |") > 0 and "## Targets" in text


def rows(**changes: Any) -> list[dict[str, Any]]:
    """Return rows of a day that meets every target at 50%, with changes to our row."""
    about = {"table": "arms", "model": "7B", "prompt": 2048}
    ours = {
        **about,
        "engine": "finepage",
        "budget": "50%",
        "tokens_equal": True,
        "logits_off": 0.0,
        "peak_bytes": 6_000_000_000,
        "budget_bytes": 6_500_000_000,
        "prefill_ms": 320.0,
        "prefill_h2d_bytes": 6_000_000_000,
        "prefill_predicted_ms": 330.0,
        "step_ms": 310.0,
        "step_h2d_bytes": 6_000_000_000,
        "step_predicted_ms": 300.0,
        "link_over_probe": 0.95,
        **changes,
    }
    return [
        {
            "table": "models",
            "model": "7B",
            "weights_bytes": 13_000_000_000,
            "probe_h2d_gb_per_s": 20.0,
            "probe_memory_gb_per_s": 2000.0,
        },
        {**about, "engine": "plain", "budget": "none", "prefill_ms": 100.0, "step_ms": 20.0},
        {**about, "engine": "zero", "budget": "none", "prefill_ms": 800.0, "step_ms": 700.0},
        {**about, "engine": "zero-persistence", "budget": ours["budget"]}
        | {"prefill_ms": 400.0, "step_ms": 400.0},
        ours,
    ]


def met(gpu_compare: Any, **changes: Any) -> dict[str, str]:
    found = gpu_compare.targets_of(rows(**changes))
    assert all(row["table"] == "targets" and row["budget"] for row in found)
    return {row["target"]: row["met"] for row in found}


def test_a_good_day_meets_every_target(gpu_compare: Any) -> None:
    found = met(gpu_compare)
    assert set(found.values()) == {"yes"} and len(found) == 11


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"tokens_equal": False}, {"tokens are those of plain"}),
        ({"logits_off": 0.2}, {"logits, off those of plain"}),
        ({"peak_bytes": 6_500_000_001}, {"peak / budget"}),
        ({"link_over_probe": 0.89}, {"link rate / probe"}),
        ({"step_predicted_ms": 270.0}, {"step, error of the prediction"}),
        ({"prefill_predicted_ms": 360.0}, {"prefill, error of the prediction"}),
        ({"step_h2d_bytes": 5_500_000_000}, {"step, time / least time"}),
        ({"prefill_h2d_bytes": 5_500_000_000}, {"prefill, time / least time"}),
        (
            {"prefill_ms": 401.0, "prefill_predicted_ms": 401.0, "prefill_h2d_bytes": 8 * 10**9},
            {"prefill, speed / zero-persistence"},
        ),
        (
            {"step_ms": 401.0, "step_predicted_ms": 401.0, "step_h2d_bytes": 8 * 10**9},
            {"step, speed / zero-persistence", "step, speed / zero"},
        ),
    ],
)
def test_a_target_that_is_missed_is_named(
    gpu_compare: Any, changes: dict[str, Any], missed: set[str]
) -> None:
    found = met(gpu_compare, **changes)
    assert {target for target, verdict in found.items() if verdict == "NO"} == missed


def test_targets_differ_by_budget(gpu_compare: Any) -> None:
    assert met(gpu_compare, budget="90%")["step, speed / zero"] == "NO"
    assert "step, speed / zero" not in met(gpu_compare, budget="25%")
    everything = met(gpu_compare, budget="100%", step_ms=20.4, prefill_ms=102.1)
    assert everything["step, time / plain"] == "yes" and "link rate / probe" not in everything
    assert everything["prefill, time / plain"] == "NO"


def test_the_whole_comparison_is_under_nine_minutes(gpu_compare: Any) -> None:
    steps = [step for step in gpu_compare.STEPS if not step.is_tiny]
    assert sum(step.limit_s for step in steps) < 9 * 60
    assert {step.words[0] for step in steps} <= {path.name for path in BENCHMARKS.glob("*.py")}
    assert [step.name for step in steps][:2] == ["machine", "tests"]


def test_zero_that_takes_too_much_keeps_less_and_tries_again(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = script("day_compare")
    bench = object.__new__(day.Bench)
    bench.name, bench.is_tiny, bench.weight_bytes, bench._expected = "tiny", True, 10_000, {}
    bench.device, bench.model = day.torch.device("cpu"), None
    tried = []

    def cell(arm: str, _: int, budget: str, nbytes: int, **settings: int) -> bool:
        tried.append((arm, budget, nbytes, settings.get(day.KEPT)))
        return settings.get(day.KEPT, 0) > 300

    monkeypatch.setattr(day, "release", lambda _: None)
    monkeypatch.setattr(bench, "cell", cell)
    searches = {(24, budget): day.Future() for budget in ("50%", "100%")}
    searches[24, "50%"].set_result({day.KEPT: 450})
    searches[24, "100%"].set_exception(RuntimeError("no search"))
    bench.zero("zero-persistence", 24, searches)
    assert tried == [
        ("zero-persistence", "50%", 5_000, 450),
        ("zero-persistence", "50%", 5_000, 250),
        ("zero-persistence", "100%", 10_000, None),
    ]
