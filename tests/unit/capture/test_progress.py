"""The status of a first call comes late, and goes in every case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ds_finepage.capture import progress
from ds_finepage.capture.progress import DELAY_S, TEXT, Progress


class Clock:
    """Stands in for ``threading.Timer``; a test tells when the time is up."""

    made: list[Clock]

    def __init__(self, delay: float, show: Callable[[], None]) -> None:
        assert delay == DELAY_S
        self.show = show
        self.is_started = self.is_cancelled = False
        Clock.made.append(self)

    def start(self) -> None:
        self.is_started = True

    def cancel(self) -> None:
        self.is_cancelled = True


class Terminal:
    """Stands in for rich's console, and for its status."""

    is_terminal = True
    order: list[str]

    def __init__(self, stderr: bool) -> None:
        assert stderr

    def status(self, text: str) -> Terminal:
        self.order.append(text)
        return self

    def start(self) -> None:
        self.order.append("start")

    def stop(self) -> None:
        self.order.append("stop")


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock.made, Terminal.order = [], []
    monkeypatch.setattr(progress.threading, "Timer", Clock)
    monkeypatch.setattr(progress, "Console", Terminal)


def test_a_short_call_shows_nothing() -> None:
    made = Progress()
    made.start()
    made.start()
    (clock,) = Clock.made
    assert clock.is_started
    made.stop()
    assert clock.is_cancelled
    clock.show()  # its thread ran already
    assert Terminal.order == []


def test_a_long_call_shows_a_status_until_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    made = Progress()
    with caplog.at_level("INFO", progress.logger.name):
        made.start()
        Clock.made[0].show()
    assert Terminal.order == [TEXT, "start"] and TEXT in caplog.text
    made.stop()
    made.stop()
    assert Terminal.order == [TEXT, "start", "stop"]
    made.start()
    assert len(Clock.made) == 2


def test_a_log_file_gets_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    no_terminal: Any = type("File", (Terminal,), {"is_terminal": False})
    monkeypatch.setattr(progress, "Console", no_terminal)
    made = Progress()
    made.start()
    Clock.made[0].show()
    made.stop()
    assert Terminal.order == []
