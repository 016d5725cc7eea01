"""How the subcommands print; nothing here imports the planner."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ds_finepage.units import format_bytes

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


def show_figures(title: str, figures: Mapping[str, Any], *, as_json: bool) -> None:
    """Print figures by name, as a table or as JSON.

    Args:
        title: Stands above the table.
        figures: The figures; those whose names end with ``_bytes`` are sizes.
        as_json: Print JSON.
    """
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    table = Table("", "", title=title, title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    for name, value in figures.items():
        text = format_bytes(value) if name.endswith("_bytes") else str(value)
        table.add_row(name.removesuffix("_bytes").replace("_", " "), text)
    show(table)
