"""``ds-finepage demo`` and ``compare`` with a model that is too small to take time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from ds_finepage.capture.models import load_model_config
from ds_finepage.cli import demo
from ds_finepage.compare import arms
from ds_finepage.compare.checkpoint import make_checkpoint
from ds_finepage.compare.worker import RUNS
from ds_finepage.reporting.results import (
    CompareSettings,
    PhaseFigures,
    Results,
    Run,
    load_results,
    over_ranks,
)
from tests.commands import Cli
from tests.e2e.conftest import finepage, tiny_config
from tests.unit.compare.runs import run

ARMS = ["plain", "zero", "finepage"]
STEPS = PhaseFigures(h2d_bytes=1500, wall_ns=10**8)
DECODE = PhaseFigures(h2d_bytes=950, wall_ns=10**7, lower_bound_bytes=900)
FIGURES: dict[str, Any] = {"budget_bytes": 600, "weight_bytes": 1500, "tokens_equal": True}
PLAIN = run("plain", **FIGURES)
STOCK = run("zero", peak_bytes=2000, prefill=STEPS, decode=STEPS, first_call_ns=10**9, **FIGURES)
OURS = run("finepage", peak_bytes=600, decode=DECODE, first_call_ns=2 * 10**9, **FIGURES)


def on_ranks(found: Run) -> Run:
    """Return a run on two ranks; rank 1 has 100 bytes more on the device."""
    more = replace(found, peak_bytes=(found.peak_bytes or 0) + 100)
    return over_ranks([found, more])


Ran = Callable[..., list[CompareSettings]]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Ran:
    """Let the demo find some runs instead of making them; return the settings that it asks with."""

    def find(*runs: Run) -> list[CompareSettings]:
        asked: list[CompareSettings] = []

        def compare(settings: CompareSettings, folder: Path, start: Results, **_: Any) -> Results:
            assert _ == {"limits_stock": False}
            asked.append(settings)
            return replace(start, runs=runs)

        monkeypatch.setattr(demo.compare, "compare", compare)
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
        (STOCK, replace(OURS, reason="it has no room"), "finepage did not run: it has no room"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_the_exit_status_judges_the_result(
    ran: Ran, stock: Run, ours: Run, problem: str | None, as_json: bool, cli: Cli
) -> None:
    ran(PLAIN, stock, ours)
    err = cli("demo", *["--json"][:as_json], status=int(problem is not None)).err
    assert (problem or "") in err and err.count("\n") == (problem is not None)


def test_the_json_is_that_of_the_comparison(ran: Ran, cli: Cli) -> None:
    ran(PLAIN, STOCK, replace(OURS, tokens_equal=False, peak_bytes=10**9))
    assert cli("demo", status=1).err.count("\n") == 2  # both problems are named
    ran(PLAIN, STOCK, OURS)
    runs = cli.json("demo")["runs"]
    assert [RUNS.validate_python(run) for run in runs] == [PLAIN, STOCK, OURS]


def rows_of(out: str) -> list[list[str]]:
    """Return the cells of the lines of a table."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines()]


def test_the_table_has_a_line_for_each_figure(ran: Ran, cli: Cli) -> None:
    asked = ran(PLAIN, STOCK, OURS)
    out = cli("demo", "--new-tokens", "5").out
    assert out.splitlines()[0].rstrip() == "Llama, 1.46 KiB of weights"
    assert [row for row in rows_of(out) if row] == [
        ["tokens equal to plain transformers", "yes", "yes", ""],
        ["peak device memory", "1.95 KiB", "600 B", "<= 600 B (budget)"],
        ["copied in a prefill", "1.46 KiB", "-", ">= -"],
        ["copied in a decode step", "1.46 KiB", "950 B", ">= 900 B"],
        ["first call", "1.00 s", "2.00 s", ""],
        ["a later call of 5 tokens", "500.00 ms", "40.00 ms", ""],
    ]
    assert "On the CPU a fetch" in out
    assert asked[0].new_tokens == 5 and asked[0].arms == tuple(ARMS)


def test_the_table_names_a_packed_form(ran: Ran, cli: Cli) -> None:
    ran(PLAIN, STOCK, OURS)
    assert "of weights in int4" in cli("demo", "--weights", "int4").out


def test_an_engine_that_did_not_run_has_no_column(ran: Ran, cli: Cli) -> None:
    ran(PLAIN, STOCK, replace(OURS, reason="it has no room"))
    assert "ds_finepage ┃" not in cli("demo", status=1).out


def test_the_model_of_the_demo_has_the_bytes_that_it_says() -> None:
    config = load_model_config(str(demo.MODEL))
    layer = 4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size
    tables = 2 * config.vocab_size * config.hidden_size
    assert 162e6 < 2 * (config.num_hidden_layers * layer + tables) < 164e6


def test_ranks_run_the_comparison_of_ranks(ran: Ran, cli: Cli) -> None:
    asked = ran(PLAIN, on_ranks(STOCK), on_ranks(OURS))
    said = cli("demo", "--ranks", "2", status=1)
    assert "finepage had 700 bytes on the device" in said.err
    peaks = [row for row in rows_of(said.out) if row and row[0].startswith("peak")]
    assert [row[:3] for row in peaks] == [
        ["peak device memory, rank 0", "1.95 KiB", "600 B"],
        ["peak device memory, rank 1", "2.05 KiB", "700 B"],
    ]
    ds_config = json.loads(asked[0].ds_config)
    assert ds_config["tensor_parallel"] == {"autotp_size": 2}
    assert ds_config["bf16"] == {"enabled": False} and asked[0].num_ranks == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "0"], "--ranks: 0 is less than 1."),
        (["--ranks", "5"], "5 ranks do not divide the 8 attention heads"),
        (["--ranks", "2", "--weights", "int4"], "packed weights are not cut over ranks"),
    ],
)
def test_ranks_that_cannot_run_are_refused_before_any_work(
    ran: Ran, options: list[str], message: str, cli: Cli
) -> None:
    asked = ran(PLAIN, STOCK, OURS)
    cli.refuses("demo", *options, says=message)
    assert asked == []


def tiny_demo(
    folder: Path, environment: dict[str, str], *options: str
) -> subprocess.CompletedProcess[str]:
    """Run the demo of a tiny model in a folder."""
    words = ["demo", "--json", "--model", tiny_config(folder), "--budget", "80%weights"]
    return finepage(*words, *options, environment=environment, cwd=folder)


Kept = tuple[Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Kept:
    """Run the demo of a packed model, from a folder that has nothing to do with the repository."""
    folder = tmp_path_factory.mktemp("elsewhere")
    options = ["--new-tokens", "6", "--weights", "int4", "--keep", "kept"]
    return folder / "kept", tiny_demo(folder, environment, *options)


def results_of(done: subprocess.CompletedProcess[str]) -> Results:
    found: Results = TypeAdapter(Results).validate_json(done.stdout)
    return found


def test_json(kept: Kept) -> None:
    found = results_of(kept[1])
    assert [run.arm for run in found.runs] == ARMS
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


def test_progress_and_what_is_kept(kept: Kept) -> None:
    folder, done = kept
    assert [line.rpartition(":")[0] for line in done.stderr.splitlines()] == [
        "making random weights for tiny.json",
        "batch 1: modelling 3 arms on t4",
        "batch 1: plain transformers",
        "batch 1: ZeRO-Inference, defaults",
        "batch 1: ds_finepage",
    ]
    assert [found.arm for found in load_results(folder).runs] == ARMS
    assert (folder / "model" / "model.safetensors").exists()


def test_both_engines_run_on_two_ranks(tmp_path: Path, environment: dict[str, str]) -> None:
    done = tiny_demo(tmp_path, environment, "--new-tokens", "4", "--ranks", "2")
    _, *engines = results_of(done).runs
    assert [len(run.ranks) for run in engines] == [2, 2]
    linear = 4 * 128 * 128 + 3 * 128 * 256 + 1024 * 128  # the output layer is cut, too
    others = 1024 * 128 + 3 * 128
    assert engines[1].weight_bytes == 4 * (linear // 2 + others)
    for stock, ours in zip(engines[0].ranks, engines[1].ranks, strict=True):
        assert stock.tokens_equal is ours.tokens_equal is True
        assert 0 < (ours.peak_bytes or 0) <= (ours.budget_bytes or 0) < (stock.peak_bytes or 0)
        assert 0 < (ours.decode.h2d_bytes or 0) < (stock.decode.h2d_bytes or 0)


def test_a_kept_folder_is_not_overwritten(kept: Kept, cli: Cli) -> None:
    cli.refuses("demo", "--keep", kept[0], says="has results")


def test_all_arms_have_the_same_tokens(tmp_path: Path, environment: dict[str, str]) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    make_checkpoint(model, tiny_config(tmp_path), num_layers=2)
    command = ["compare", "--model", str(model), "--out", str(out), "--arms", "all", "--json"]
    options = ["--device-budget", "90%weights", "--prompt", "8", "--new", "5", "--repeats", "1"]
    done = finepage(*command, *options, environment=environment)
    runs = json.loads(done.stdout)["runs"]
    found = [(run["arm"], run["reason"], run["tokens_equal"]) for run in runs]
    assert found == [(arm, None, True) for arm in arms.ARMS]
