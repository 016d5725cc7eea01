"""``ds-finepage demo`` with a model that is too small to take time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from ds_finepage.cli import demo, main
from ds_finepage.cli.demo import example, of_ranks
from ds_finepage.compare.worker import RUNS
from ds_finepage.errors import FinepageError
from ds_finepage.reporting.results import (
    CompareSettings,
    PhaseFigures,
    Results,
    Run,
    load_results,
    over_ranks,
)
from tests.e2e.conftest import finepage
from tests.unit.compare.runs import run

DEMO = ("demo", "--json", "--tiny", "--budget", "80%weights")
STEPS = PhaseFigures(h2d_bytes=1500, wall_ns=10**8)
PREFILL = PhaseFigures(h2d_bytes=1000, wall_ns=10**8, lower_bound_bytes=800)
DECODE = PhaseFigures(h2d_bytes=950, wall_ns=10**7, lower_bound_bytes=900)
FIGURES: dict[str, Any] = {"budget_bytes": 600, "weight_bytes": 1500, "tokens_equal": True}
PLAIN = run("plain", **FIGURES)
STOCK = run("zero", peak_bytes=2000, prefill=STEPS, decode=STEPS, first_call_ns=10**9, **FIGURES)
OURS = run(
    "finepage", peak_bytes=600, prefill=PREFILL, decode=DECODE, first_call_ns=2 * 10**9, **FIGURES
)


def on_ranks(found: Run) -> Run:
    """Return a run on two ranks; rank 1 has 100 bytes more on the device."""
    more = replace(found, peak_bytes=(found.peak_bytes or 0) + 100)
    return over_ranks([found, more])


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[CompareSettings]]:
    """Let the demo find some runs instead of making them; return the settings that it asks with."""

    def find(*runs: Run) -> list[CompareSettings]:
        asked: list[CompareSettings] = []

        def compare(settings: CompareSettings, folder: Path, start: Results, **_: Any) -> Results:
            assert _ == {"limits_stock": False}
            asked.append(settings)
            return replace(start, runs=runs)

        monkeypatch.setattr(demo.compare, "compare", compare)
        monkeypatch.setattr(demo, "make_model", lambda folder, shape: None)
        return asked

    return find


@pytest.mark.parametrize(
    ("stock", "ours", "problem"),
    [
        (STOCK, OURS, None),
        (STOCK, replace(OURS, tokens_equal=False), "the tokens of finepage differ"),
        (replace(STOCK, tokens_equal=False), OURS, "the tokens of zero differ"),
        (
            STOCK,
            replace(OURS, peak_bytes=601),
            "finepage had 601 bytes on the device; the budget is 600 bytes",
        ),
        (replace(STOCK, peak_bytes=10**9), OURS, None),  # it has no budget
        (
            STOCK,
            replace(OURS, reason="it has no room"),
            "ds_finepage did not run: it has no room (--keep DIR keeps all logs.)",
        ),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_status_judges_the_result(
    ran: Any, stock: Run, ours: Run, problem: str | None, as_json: bool, capsys: Any
) -> None:
    ran(PLAIN, stock, ours)
    assert main(["demo", "--json"] if as_json else ["demo"]) == (problem is not None)
    captured = capsys.readouterr()
    assert (problem or "") in captured.err and captured.err.count("\n") == (problem is not None)
    if ours.reason is None and not as_json:
        assert "600 B (budget)" in captured.out and ">= 900 B" in captured.out


def test_the_json_is_that_of_the_comparison(
    ran: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ran(PLAIN, STOCK, replace(OURS, tokens_equal=False, peak_bytes=10**9))
    assert main(["demo"]) == 1
    assert capsys.readouterr().err.count("\n") == 2  # both problems are named
    ran(PLAIN, STOCK, OURS)
    assert main(["demo", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [RUNS.validate_python(run) for run in runs] == [PLAIN, STOCK, OURS]


def lines_of(out: str) -> dict[str, list[str]]:
    lines = [line.split("│") for line in out.splitlines() if "│" in line]
    return {line[1].strip(): [cell.strip() for cell in line[2:-1]] for line in lines}


def test_each_line_of_the_table_shows_its_own_figure(
    ran: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    ran(PLAIN, STOCK, OURS)
    assert main(["demo", "--new-tokens", "5"]) == 0
    shown = lines_of(capsys.readouterr().out)
    assert shown["tokens equal to plain transformers"] == ["yes", "yes", ""]
    assert shown["peak device bytes"] == ["1.95 KiB", "600 B", "<= 600 B (budget)"]
    assert shown["reloaded in a prefill"] == ["1.46 KiB", "1000 B", ">= 800 B"]
    assert shown["reloaded in a steady decode step"] == ["1.46 KiB", "950 B", ">= 900 B"]
    assert shown["wall time, first call"] == ["1.00 s", "2.00 s", ""]
    assert shown["wall time, a later call"] == ["500.00 ms", "140.00 ms", ""]


def test_each_rank_has_its_own_figures(
    ran: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ran(PLAIN, on_ranks(STOCK), on_ranks(OURS))
    assert main(["demo", "--tiny", "--ranks", "2"]) == 1
    captured = capsys.readouterr()
    assert "finepage had 700 bytes on the device" in captured.err
    assert "1.46 KiB of weights a rank, over 2 ranks" in captured.out
    shown = lines_of(captured.out)
    assert shown["peak device bytes, rank 0"] == ["1.95 KiB", "600 B", "<= 600 B (budget)"]
    assert shown["peak device bytes, rank 1"] == ["2.05 KiB", "700 B", "<= 600 B (budget)"]
    ds_config = json.loads(asked[0].ds_config)
    assert ds_config["tensor_parallel"] == {"autotp_size": 2}
    assert ds_config["bf16"] == {"enabled": False} and asked[0].num_ranks == 2
    assert main(["demo", "--tiny", "--ranks", "2", "--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["runs"][-1]["ranks"]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "--ranks: 0 is less than 1."),
        (["--ranks", "3"], "3 ranks do not divide the 4 attention heads"),
        (["--ranks", "2", "--weights", "int4"], "packed weights are not cut over ranks"),
    ],
)
def test_ranks_that_cannot_run_are_refused_before_any_work(
    ran: Any, options: list[str], message: str, capsys: Any
) -> None:
    asked = ran(PLAIN, STOCK, OURS)
    assert main(["demo", "--tiny", *options]) == 2
    assert message in capsys.readouterr().err and asked == []


def test_a_checkpoint_that_cannot_be_made_ends_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: Any, log: Path) -> int:
        log.write_text("first\nthe reason\n")
        return 1

    monkeypatch.setattr(demo, "run_process", fail)
    with pytest.raises(FinepageError, match=r"'checkpoint' ended with status 1: the reason \(--k"):
        demo.make_model(tmp_path, demo.TINY)


def test_the_example_that_runs_is_the_one_in_the_repository() -> None:
    """setup.py installs the folder of examples; in a checkout they are where they are."""
    root = Path(__file__).parents[2]
    assert example("generate.py") == root / "examples" / "generate.py"
    assert '"ds_finepage.examples": "examples"' in (root / "setup.py").read_text()


@pytest.fixture(scope="module")
def kept(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run the demo of a packed model, from a folder that has nothing to do with the repository."""
    folder = tmp_path_factory.mktemp("elsewhere")
    options = ["--new-tokens", "6", "--weights", "int4", "--keep", "kept"]
    return folder / "kept", finepage(*DEMO, *options, environment=environment, cwd=folder)


def results_of(done: subprocess.CompletedProcess[str]) -> Results:
    found: Results = TypeAdapter(Results).validate_json(done.stdout)
    return found


def test_json(kept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = kept
    found = results_of(done)
    assert [run.arm for run in found.runs] == ["plain", *demo.ENGINES]
    _, stock, ours = found.runs
    weight_bytes, budget_bytes = ours.weight_bytes or 0, ours.budget_bytes or 0
    linear = 4 * 128 * 128 + 3 * 128 * 256
    others = 2 * (2 * 1024 * 128 + 3 * 128)
    assert weight_bytes == others + linear // 2 + linear // 64 * 4
    assert budget_bytes == weight_bytes * 80 // 100
    assert stock.tokens_equal is ours.tokens_equal is True
    assert 0 < (ours.peak_bytes or 0) <= budget_bytes < weight_bytes < (stock.peak_bytes or 0)
    step = ours.decode
    assert 0 < (step.lower_bound_bytes or 0) <= (step.h2d_bytes or 0) <= weight_bytes
    assert (stock.decode.h2d_bytes or 0) <= weight_bytes
    assert (ours.first_call_ns or 0) > 0 and (stock.first_call_ns or 0) > 0
    config = json.loads((folder / "zero_inference.json").read_text())["finepage"]
    assert (config["enabled"], config["weights"], config["weights_group"]) == (False, "int4", 64)


def test_progress_and_what_is_kept(kept: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = kept
    assert [line.rpartition(":")[0] or line for line in done.stderr.splitlines()] == [
        "making a Llama checkpoint",
        "batch 1: modelling 3 arms on t4",
        "batch 1: plain transformers",
        "batch 1: ZeRO-Inference, defaults",
        "batch 1: ds_finepage",
    ]
    names = demo.ENGINES.values()
    configs = [json.loads((folder / f"{name}.json").read_text()) for name in names]
    assert [c["finepage"].pop("enabled") for c in configs] == [False, True]
    assert configs[0] == configs[1]
    assert [found.arm for found in load_results(folder).runs] == ["plain", *demo.ENGINES]


def test_both_engines_run_on_two_ranks(tmp_path: Path, environment: dict[str, str]) -> None:
    options = ["--new-tokens", "4", "--ranks", "2"]
    done = finepage(*DEMO, *options, environment=environment, cwd=tmp_path)
    ranks = of_ranks(results_of(done))
    assert len(ranks) == 2
    linear = 4 * 128 * 128 + 3 * 128 * 256 + 1024 * 128  # the output layer is cut, too
    others = 1024 * 128 + 3 * 128
    for stock, ours in ranks:
        assert stock.tokens_equal is ours.tokens_equal is True
        assert ours.weight_bytes == 4 * (linear // 2 + others)
        assert 0 < (ours.peak_bytes or 0) <= (ours.budget_bytes or 0) < (stock.peak_bytes or 0)
        assert 0 < (ours.decode.h2d_bytes or 0) < (stock.decode.h2d_bytes or 0)


def test_a_kept_folder_is_not_overwritten(
    kept: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--keep", str(kept[0])]) == 2
    assert "is not an empty folder" in capsys.readouterr().err
