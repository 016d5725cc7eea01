"""The figures of all ranks of a model side by side, for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from rich.table import Table

from ds_finepage.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
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

    @classmethod
    def of(cls, numbers: Sequence[int]) -> RankFigures:
        """Return the figures that ``dataclasses.astuple`` has made numbers of."""
        return cls(**{f.name: number for f, number in zip(fields(cls), numbers, strict=True)})


def rank_table(ranks: Sequence[RankFigures]) -> Table:
    """Return a table with a row for each rank.

    Args:
        ranks: Of rank 0 and those after it.
    """
    headings = (
        "rank",
        "weights",
        "budget",
        "least that can run",
        "reloaded",
        "offloaded",
        "plans",
        "runs",
        "without a plan",
    )
    table = Table(title=f"{len(ranks)} ranks", title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="right")
    for number, rank in enumerate(ranks):
        table.add_row(
            str(number),
            format_bytes(rank.weight_bytes),
            format_bytes(rank.budget_bytes),
            format_bytes(rank.min_budget_bytes),
            format_bytes(rank.reloaded_bytes),
            format_bytes(rank.offloaded_bytes),
            str(rank.num_plans),
            str(rank.num_runs),
            str(rank.num_unplanned),
        )
    return table
