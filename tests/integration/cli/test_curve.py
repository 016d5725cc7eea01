from __future__ import annotations

from pathlib import Path

import pytest

from ds_finepage.cli import progress
from tests.commands import Cli
from tests.integration.cli.models import NUM_PARAMETERS, card


@pytest.fixture
def curve(model: str, tmp_path: Path) -> list[str]:
    """A small model on a card whose link is slow enough for a budget to matter."""
    slow = card(tmp_path, "slow", h2d_bytes_per_s=1e9, launch_ns=0, transfer_latency_ns=0)
    return ["curve", "--model", model, "--seq", "64", "--hardware", str(slow), "--points", "6"]


def test_json(curve: list[str], cli: Cli) -> None:
    found = cli.json(*curve)
    assert (found["batch"], found["seq"], found["hardware"]) == (1, 64, "slow")
    assert found["weight_bytes"] == 2 * NUM_PARAMETERS
    points = found["points"]
    assert len(points) == 6
    for low, high in zip(points, points[1:], strict=False):
        assert low["budget_bytes"] < high["budget_bytes"]
        assert low["tokens_per_s"] <= high["tokens_per_s"]
        assert low["first_token_ns"] >= high["first_token_ns"]
    for point in points:
        assert point["tokens_per_s"] <= point["tokens_per_s_bound"] * 1.000001
        assert point["first_token_ns"] >= point["first_token_bound_ns"]
        assert point["fits"]
    assert points[-1]["tokens_per_s"] > 2 * points[0]["tokens_per_s"]
    assert found["knees"][0]["from_bytes"] == points[0]["budget_bytes"]
    assert found["knees"][-1]["to_bytes"] == points[-1]["budget_bytes"]


@pytest.mark.parametrize("forms", ["bf16", "bf16,int4"])
def test_each_budget_is_counted_on_the_standard_error(
    curve: list[str], forms: str, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(progress, "PERIOD_S", 0.0)
    said = cli(*curve, "--weights", forms).err
    counted = [line for line in said.splitlines() if line.startswith("planning: ")]
    found = cli.json(*curve, "--weights", forms)
    total = sum(len(c["points"]) for c in (found if isinstance(found, list) else [found]))
    assert counted == [f"planning: {n} of {total}" for n in range(1, total + 1)]


def test_a_model_is_cut_over_ranks(curve: list[str], cli: Cli) -> None:
    two = [*curve, "--points", "2", "--tokens-per-s", "1", "--ranks", "2"]
    found = cli.json(*two)
    whole = 500 * 256 + 5 * 256  # the table and the norms are not cut
    assert found["weight_bytes"] == 2 * ((NUM_PARAMETERS - whole) // 2 + whole)
    assert found["num_ranks"] == 2
    assert "slow, each of 2 ranks" in cli(*two).words


def test_the_inverse(curve: list[str], cli: Cli) -> None:
    points = cli.json(*curve)["points"]
    between = (points[2]["tokens_per_s"] + points[3]["tokens_per_s"]) / 2
    found = cli.json(*curve, "--tokens-per-s", f"{between},1e12,0.001")
    by_speed = {need["tokens_per_s"]: need["budget_bytes"] for need in found["needs"]}
    assert list(by_speed) == [between, 0.001]  # and nothing reaches a trillion
    assert points[2]["budget_bytes"] < by_speed[between] <= points[3]["budget_bytes"]
    assert by_speed[0.001] == points[0]["budget_bytes"]
    # It was planned, so the command that plans confirms it.
    planned = cli.json("plan", *curve[1:-2], "--device-budget", by_speed[between])
    assert 1e9 / planned["predicted_ns"] >= between


def test_words(curve: list[str], cli: Cli) -> None:
    out = cli(*curve).out
    assert " buys " in out and " tok/s needs " in out and "first token" in out


def test_budgets_beyond_the_card_are_marked(curve: list[str], tmp_path: Path, cli: Cli) -> None:
    path = card(tmp_path, "small", capacity_bytes=3 << 20)
    found = cli.json(*curve, "--hardware", path)
    assert {p["fits"] for p in found["points"]} == {True, False}
    for point in found["points"]:
        assert point["fits"] == (point["budget_bytes"] <= 3 << 20)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--points", "1"], "2 or more"),
        (["--tokens-per-s", "fast"], "not a number above 0"),
        (["--tokens-per-s", "0"], "not a number above 0"),
        (["--model", "lama-7b"], "llama-7b"),
        (["--hardware", "t5"], "t4"),
        (["--policy", "finpage"], "finepage"),
        (["--seq", "1000"], "128 positions"),
    ],
)
def test_bad_options(curve: list[str], changes: list[str], words: str, cli: Cli) -> None:
    cli.refuses(*curve, *changes, says=words)
