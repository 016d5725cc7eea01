"""A command that plans for long says how far it is."""

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
