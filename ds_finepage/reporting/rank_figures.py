"""The figures of all ranks of a model side by side, for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from ds_finepage.reporting.tabular import table_of
from ds_finepage.units import format_bytes


@dataclass(frozen=True, slots=True)
class RankFigures:
    """The counters of one rank; the bytes of copies are those of all its runs."""

    weight_bytes: int
    budget_bytes: int
    min_budget_bytes: int
    reloaded_bytes: int
    offloaded_bytes: int
    num_plans: int
    num_runs: int
    num_unplanned: int


def rank_table(ranks: Sequence[RankFigures]) -> Table:
    """Return a table with a row for each rank.

    Args:
        ranks: Of rank 0 and those after it.
    """
    columns: list[tuple[str, Callable[[tuple[int, RankFigures]], str]]] = [
        ("rank", lambda r: str(r[0])),
        ("weights", lambda r: format_bytes(r[1].weight_bytes)),
        ("budget", lambda r: format_bytes(r[1].budget_bytes)),
        ("least that can run", lambda r: format_bytes(r[1].min_budget_bytes)),
        ("reloaded", lambda r: format_bytes(r[1].reloaded_bytes)),
        ("offloaded", lambda r: format_bytes(r[1].offloaded_bytes)),
        ("plans", lambda r: str(r[1].num_plans)),
        ("runs", lambda r: str(r[1].num_runs)),
        ("without a plan", lambda r: str(r[1].num_unplanned)),
    ]
    return table_of(f"{len(ranks)} ranks", columns, enumerate(ranks))
