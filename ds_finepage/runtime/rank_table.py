"""The figures of all ranks of a model side by side, for the terminal."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

from rich.table import Table

from ds_finepage.reporting.tabular import table_of
from ds_finepage.runtime.ranks import Ranks
from ds_finepage.runtime.stats import Stats
from ds_finepage.units import format_bytes

FIGURES: tuple[tuple[str, Callable[[Stats], int], Callable[[int], str]], ...] = (
    ("weights", lambda s: s.weight_bytes, format_bytes),
    ("budget", lambda s: s.budget_bytes, format_bytes),
    ("least that can run", lambda s: s.min_budget_bytes, format_bytes),
    ("reloaded", lambda s: s.reloaded_bytes, format_bytes),
    ("offloaded", lambda s: s.offloaded_bytes, format_bytes),
    ("plans", lambda s: s.num_plans, str),
    ("runs", lambda s: sum(p.num_runs for p in s.passes), str),
    ("without a plan", lambda s: s.num_unplanned_graphs + s.num_unplanned_modules, str),
)
"""Of each figure: its heading, and the functions that read and show it."""


def rank_table(ranks: Ranks, stats: Stats) -> Table:
    """Return a table with a row for each rank; all of them have to call this.

    Raises:
        RankError: Another rank is gone.
    """
    found = ranks.of_all([read(stats) for _, read, _ in FIGURES])
    rows = [
        [str(rank), *(show(n) for n, (_, _, show) in zip(numbers, FIGURES, strict=True))]
        for rank, numbers in enumerate(found)
    ]
    headings = ("rank", *(heading for heading, _, _ in FIGURES))
    columns = [(heading, itemgetter(at)) for at, heading in enumerate(headings)]
    return table_of(f"{len(rows)} ranks", columns, rows)
