from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from rich.console import Console

from ds_finepage.cli import output
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
        assert point["decode_ns"] >= point["decode_bound_ns"]
        assert point["first_token_ns"] >= point["first_token_bound_ns"]
        assert point["budget_bytes"] <= found["capacity_bytes"]
    assert points[-1]["tokens_per_s"] > 2 * points[0]["tokens_per_s"]


def test_a_bar_on_a_terminal_goes_through_the_budgets(
    curve: list[str], monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    assert cli(*curve, "--json").err == ""
    terminal = functools.partial(Console, force_terminal=True)
    monkeypatch.setattr(output, "Console", terminal)
    said = cli(*curve, "--json")
    assert "planning" in said.err and "100%" in said.err
    assert len(json.loads(said.out)["points"]) == 6


def test_a_model_is_cut_over_ranks(curve: list[str], cli: Cli) -> None:
    two = [*curve, "--points", "2", "--ranks", "2"]
    found = cli.json(*two)
    whole = 500 * 256 + 5 * 256  # the table and the norms are not cut
    assert found["weight_bytes"] == 2 * ((NUM_PARAMETERS - whole) // 2 + whole)
    assert found["num_ranks"] == 2
    assert "slow, each of 2 ranks" in cli(*two).words


def test_words(curve: list[str], cli: Cli) -> None:
    out = cli(*curve).out
    assert "tok/s" in out and "first token" in out and "reloaded a token" in out


def test_budgets_beyond_the_card_are_marked(curve: list[str], tmp_path: Path, cli: Cli) -> None:
    path = card(tmp_path, "small", capacity_bytes=3 << 20)
    found = cli.json(*curve, "--hardware", path)
    beyond = [p for p in found["points"] if p["budget_bytes"] > found["capacity_bytes"] == 3 << 20]
    assert 0 < cli(*curve, "--hardware", path).out.count("more than the") == len(beyond) < 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--points", "1"], "2 or more"),
        (["--model", "lama-7b"], "llama-7b"),
        (["--hardware", "t5"], "t4"),
        (["--policy", "finpage"], "finepage"),
        (["--seq", "1000"], "128 positions"),
    ],
)
def test_bad_options(curve: list[str], changes: list[str], words: str, cli: Cli) -> None:
    cli.refuses(*curve, *changes, says=words)
