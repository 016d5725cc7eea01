from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from ds_finepage.cli import grid
from ds_finepage.cli.grid import to_rows
from tests.commands import Cli
from tests.integration.cli.models import card, small_model
from tests.unit.points import point


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Two models on two cards; the larger model's longest sequence fits on neither."""
    models = [
        small_model(tmp_path, "one"),
        small_model(tmp_path, "two", intermediate_size=1024, max_position_embeddings=64),
    ]
    cards = [card(tmp_path, name, capacity_bytes=600 << 20) for name in ("slow", "fast")]
    words = ["grid", "--models", ",".join(map(str, models))]
    words += ["--hardware", ",".join(map(str, cards)), "--batch", "2", "--seq", "32,128"]
    return [*words, "--policies", "finepage", "--device-budget", "4MiB"]


# What comes out.


def test_json_has_every_cell(arguments: list[str], cli: Cli) -> None:
    found = cli.json(*arguments)["cells"]
    assert len(found) == 2 * 2 * 2
    identity = ["model", "hardware", "batch", "seq", "policy", "weights", "num_ranks"]
    assert list(found[0])[:9] == [*identity, "runs", "reason"]
    for cell in found:
        fits = not (cell["model"].endswith("two") and cell["seq"] == 128)
        assert cell["runs"] == fits, cell
        if fits:
            assert cell["tokens_per_s"] == pytest.approx(cell["batch"] * 1e9 / cell["decode_ns"])
            assert cell["decode_bound_ns"] <= cell["decode_ns"] < cell["first_token_ns"] * 2
            assert cell["reason"] is None
        else:
            assert "more than the model's 64 positions" in cell["reason"]
            assert cell["tokens_per_s"] is None


def test_models_are_cut_over_ranks(model: str, cli: Cli) -> None:
    arguments = ["grid", "--models", model, "--hardware", "t4", "--seq", "32"]
    arguments += ["--policies", "finepage", "--batch", "2"]
    ranks = [*arguments, "--ranks", "2"]
    assert "each of 2 ranks" in cli(*ranks).words
    (cell,), (whole,) = cli.json(*ranks)["cells"], cli.json(*arguments)["cells"]
    assert (cell["num_ranks"], whole["num_ranks"]) == (2, 1)
    assert cell["weight_bytes"] < 0.7 * whole["weight_bytes"]


def test_a_card_that_is_too_small_says_so(arguments: list[str], cli: Cli) -> None:
    for cell in cli.json(*arguments, "--device-budget", "200KiB")["cells"]:
        assert not cell["runs"]
        assert "min_budget_bytes" in cell["reason"] or "positions" in cell["reason"]


def test_the_table_numbers_the_reasons(arguments: list[str], tmp_path: Path, cli: Cli) -> None:
    before = sorted(tmp_path.rglob("*.json"))
    out = cli(*arguments).out
    assert "no (1)" in out and "(1) prefill: seq: 128 tokens" in out and "(2)" not in out
    assert sorted(tmp_path.rglob("*.json")) == before  # no file where none is asked for


def test_the_baseline_is_compared_with() -> None:
    def result(speed: float) -> grid.Point:
        return point(tokens_per_s=speed, decode_ns=int(1e9 / speed), first_token_ns=10**9)

    def cell(policy: str) -> grid.Cell:
        return grid.Cell(model="m", hardware="h", batch=1, seq=1, policy=policy)

    table = grid.to_table({cell("zero"): result(2.0), cell("finepage"): result(5.0)})
    texts = [list(column.cells)[0] for column in table.columns]
    figures = ["m", "h", "1", "1", "2.00, 1.00 s", "5.00 (2.50 x), 1.00 s"]
    outcomes = ["finepage; finepage 2.50 x zero", "zero; finepage 1.00 x zero"]
    assert texts == [*figures, *outcomes]


def test_the_json_has_date_command_and_versions(arguments: list[str], cli: Cli) -> None:
    found = cli.json(*arguments)
    assert found["date"] == datetime.date.today().isoformat() and found["versions"]["torch"]
    assert found["command"].startswith("ds-finepage grid --models ")


# What is refused.


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--models", "llama-7b,lama-7b"], "Did you mean 'llama-7b'?"),
        (["--models", ","], "names nothing"),
        (["--hardware", "t4,t5"], "unknown hardware profile 't5'"),
        (["--policies", "finpage"], "unknown policy 'finpage'"),
        (["--batch", "1,two"], "'two' is not a whole number"),
        (["--seq", "0"], "'0' is not a whole number of 1 or more"),
        (["--device-budget", "50%"], "50%device"),
    ],
)
def test_bad_options(arguments: list[str], changes: list[str], words: str, cli: Cli) -> None:
    cli.refuses(*arguments, *changes, says=words)


def shown(**times: tuple[int, int]) -> grid.Results:
    """Make one row: the times of a first token and of a step, by policy."""
    results: grid.Results = {}
    for name, (first, step) in times.items():
        cell = grid.Cell(model="m", hardware="h", batch=1, seq=1, policy=name)
        results[cell] = point(tokens_per_s=1e9 / step, first_token_ns=first, decode_ns=step)
    return results


def test_each_row_names_its_winner_and_finepage_over_the_best_baseline() -> None:
    """A policy that pages as finepage does is no baseline."""
    results = shown(zero=(90, 90), static=(10, 30), horizon=(5, 5), finepage=(11, 20))
    row = to_rows(results)[0]["row"]
    assert row["prefill"] == {
        "winner": "horizon",
        "best_baseline": "static",
        "over_baselines": 10 / 11,
    }
    assert row["decode"]["winner"] == "horizon" and row["decode"]["over_baselines"] == 1.5
    table = grid.to_table(shown(zero=(90, 90), static=(10, 30), finepage=(11, 20)))
    texts = [list(column.cells)[0] for column in table.columns]
    assert texts[-2:] == ["finepage; finepage 1.50 x static", "static; finepage 0.91 x static"]


def test_a_row_without_finepage_or_without_baselines_has_a_winner_only() -> None:
    for results in (shown(zero=(2, 2)), shown(finepage=(2, 2))):
        table = grid.to_table(results)
        assert list(table.columns[-1].cells) == [next(iter(results)).policy]
        assert to_rows(results)[0]["row"]["decode"]["over_baselines"] is None


def test_the_settings_found_are_printed(model: str, tmp_path: Path, cli: Cli) -> None:
    """The default policies have the best baselines among them."""
    command = ["grid", "--models", model, "--hardware", card(tmp_path), "--seq", "32"]
    command += ["--device-budget", "80%weights"]
    lines = [x for x in cli(*command).out.splitlines() if x.startswith("zero_optimization")]
    found = [json.loads(line[line.index("{") :]) for line in lines]
    by_policy = {cell["policy"]: cell for cell in cli.json(*command)["cells"]}
    assert list(by_policy) == ["zero", "zero-persistence", "static", "horizon", "finepage"]
    searched = by_policy["zero-persistence"]
    assert found == [searched["prefill_settings"], searched["decode_settings"]]
    assert found[0]["stage3_model_persistence_threshold"] > 0
    assert by_policy["static"]["prefill_settings"] is None
    assert searched["row"]["decode"]["best_baseline"] in ("zero-persistence", "static")


def test_the_host_computes_in_every_cell_of_ours(model: str, tmp_path: Path, cli: Cli) -> None:
    slow = {"h2d_bytes_per_s": 1e8, "launch_ns": 0, "transfer_latency_ns": 0}
    cards = ",".join(str(card(tmp_path, name, **slow)) for name in ("one", "two"))
    given = ["grid", "--models", model, "--hardware", cards, "--seq", "64"]
    given += ["--policies", "lru,finepage", "--device-budget", "60%weights"]
    alone, beside = (
        {(c["hardware"].rpartition("/")[2], c["policy"]): c["tokens_per_s"] for c in found["cells"]}
        for found in (cli.json(*given), cli.json(*given, "--host", "server"))
    )
    for name in ("one.json", "two.json"):
        assert beside[f"{name}+server", "lru"] == alone[name, "lru"]
        assert beside[f"{name}+server", "finepage"] > alone[name, "finepage"]
