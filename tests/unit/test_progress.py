"""A command that plans for long says how far it is, and figures are printed by name."""

from __future__ import annotations

import pytest
from rich.console import Console

from ds_finepage.cli import output
from ds_finepage.cli.output import PERIOD_S, with_progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time, which stands still."""
    now = [0.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_there_is_a_line_a_minute(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in with_progress("abcde"):
        clock[0] += PERIOD_S / 2
    captured = capsys.readouterr()
    assert captured.err == "planning: 2 of 5\nplanning: 4 of 5\n" and captured.out == ""


def test_on_a_terminal_there_is_a_bar_and_no_line(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        output, "Console", lambda **options: Console(force_terminal=True, **options)
    )
    found = []
    for item in with_progress("ab"):
        clock[0] += PERIOD_S
        found.append(item)
    err = capsys.readouterr().err
    assert found == ["a", "b"] and "planning: " not in err and "100%" in err


def test_a_figure_is_printed_by_its_name_in_its_unit(capsys: pytest.CaptureFixture[str]) -> None:
    figures = {
        "peak_bytes": 3 << 30,
        "gap_share": 0.0125,
        "num_tasks": 11,
        "kv_on_host": False,
        "weights": None,
    }
    output.show_figures("a plan", figures.items())
    title, _, *rows, _ = capsys.readouterr().out.splitlines()
    assert title.strip() == "a plan"
    assert [row.strip("│ ").split() for row in rows] == [
        ["peak", "│", "3.00", "GiB"],
        ["gap", "│", "1.25%"],
        ["num", "tasks", "│", "11"],
        ["kv", "on", "host", "│", "False"],
    ]
