"""Shows on the standard error how far a command is: a bar on a terminal, else a line a minute."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import TypeVar

from rich import progress
from rich.console import Console

T = TypeVar("T")
PERIOD_S = 60.0


class Progress:
    """Counts the steps of a command while it is entered."""

    def __init__(self, total: int) -> None:
        """Begin at 0.

        Args:
            total: The steps, as far as they are known.
        """
        console = Console(stderr=True)
        self._total, self._done, self._said = total, 0, time.monotonic()
        self._is_terminal = console.is_terminal
        hidden = not self._is_terminal
        self._bar = progress.Progress(console=console, transient=True, disable=hidden)
        self._task = self._bar.add_task("planning", total=total)

    def __enter__(self) -> Progress:
        """Show the bar, if there is one."""
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take it away."""
        self._bar.stop()

    def advance(self, _: object = None) -> None:
        """Count a step; a future calls it when it is done."""
        self._done += 1
        self._bar.advance(self._task)
        if not self._is_terminal and time.monotonic() - self._said >= PERIOD_S:
            self._said = time.monotonic()
            print(f"planning: {self._done} of {self._total}", file=sys.stderr, flush=True)


def with_progress(items: Sequence[T]) -> Iterator[T]:
    """Go through items, and show how far that is."""
    with Progress(len(items)) as shown:
        for item in items:
            yield item
            shown.advance()
