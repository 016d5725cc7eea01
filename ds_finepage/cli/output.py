"""How the subcommands print; nothing here imports the planner."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

from ds_finepage.units import format_bytes

T = TypeVar("T")
PERIOD_S = 60.0
"""From one line about progress to the next."""

UNITS: dict[str, Callable[[Any], str]] = {
    "bytes": format_bytes,
    "share": "{:.2%}".format,
}
"""The ends of the names of figures that have a unit, and what prints them."""

TABLE_WIDTH = 110
"""Columns of output to a file or a pipe."""


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option that prints only JSON to the standard output."""
    parser.add_argument("--json", action="store_true", help="print JSON, no table")


def show(table: Table) -> None:
    """Print a table in full, also to a file or a pipe."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_WIDTH)
    console.print(table)


def with_progress(items: Sequence[T]) -> Iterator[T]:
    """Go through items, and show on the standard error how far that is.

    A bar on a terminal, else a line a minute.
    """
    console, said = Console(stderr=True), time.monotonic()
    hidden = not console.is_terminal
    shown = track(items, "planning", console=console, transient=True, disable=hidden)
    for done, item in enumerate(shown, 1):
        yield item
        if hidden and time.monotonic() - said >= PERIOD_S:
            said = time.monotonic()
            print(f"planning: {done} of {len(items)}", file=sys.stderr, flush=True)


def show_figures(title: str, figures: Iterable[tuple[str, Any]]) -> None:
    """Print figures by name, as a table.

    Args:
        title: Stands above the table.
        figures: Names and figures. Names of sizes end with ``_bytes``, and of shares with
            ``_share``. Figures that are None are left out.
    """
    table = Table("", "", title=title, title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    for name, value in figures:
        base, _, unit = name.rpartition("_")
        label = base if unit in UNITS else name
        if value is not None:
            table.add_row(label.replace("_", " "), UNITS.get(unit, str)(value))
    show(table)
