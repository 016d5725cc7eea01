from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ds_finepage.cli import main, output
from tests.integration.cli.models import NUM_PARAMETERS, card, small_model


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A small model on a card whose link is slow enough for a budget to matter."""
    slow = card(tmp_path, "slow", h2d_bytes_per_s=1e9, launch_ns=0, transfer_latency_ns=0)
    model = small_model(tmp_path)
    return ["curve", "--model", str(model), "--seq", "64", "--hardware", str(slow), "--points", "6"]


def curve(capsys: pytest.CaptureFixture[str], arguments: list[str], *more: str) -> dict[str, Any]:
    assert main([*arguments, "--json", *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


# The command.


def test_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = curve(capsys, arguments)
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
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--json"]) == 0
    assert capsys.readouterr().err == ""
    terminal = functools.partial(Console, force_terminal=True)
    monkeypatch.setattr(output, "Console", terminal)
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert "planning" in captured.err and "100%" in captured.err
    assert len(json.loads(captured.out)["points"]) == 6


def test_a_model_is_cut_over_ranks(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*arguments, "--points", "2", "--ranks", "2"]
    found = curve(capsys, arguments)
    whole = 500 * 256 + 5 * 256  # the table and the norms are not cut
    assert found["weight_bytes"] == 2 * ((NUM_PARAMETERS - whole) // 2 + whole)
    assert found["num_ranks"] == 2
    assert main(arguments) == 0
    assert "slow, each of 2 ranks" in " ".join(capsys.readouterr().out.split())


def test_words(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "tok/s" in out and "first token" in out and "reloaded a token" in out


def test_budgets_beyond_the_card_are_marked(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = card(tmp_path, "small", capacity_bytes=3 << 20)
    found = curve(capsys, arguments, "--hardware", str(path))
    beyond = [p for p in found["points"] if p["budget_bytes"] > found["capacity_bytes"] == 3 << 20]
    assert main([*arguments, "--hardware", str(path)]) == 0
    assert 0 < capsys.readouterr().out.count("more than the") == len(beyond) < 6


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
def test_bad_options(
    arguments: list[str], changes: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *changes]) == 2
    assert words in capsys.readouterr().err
