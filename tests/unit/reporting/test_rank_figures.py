"""The table over ranks: each figure in its row and column."""

from __future__ import annotations

from ds_finepage.reporting.rank_figures import RankFigures, rank_table

FIGURES = RankFigures(
    weight_bytes=1 << 20,
    budget_bytes=2 << 20,
    min_budget_bytes=3 << 20,
    reloaded_bytes=4 << 20,
    offloaded_bytes=5 << 20,
    num_plans=6,
    num_runs=7,
    num_unplanned=8,
)


def test_each_rank_has_a_row() -> None:
    table = rank_table([FIGURES, FIGURES])
    assert str(table.title) == "2 ranks"
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns.pop("rank") == ["0", "1"]
    assert columns == {
        "weights": ["1.00 MiB"] * 2,
        "budget": ["2.00 MiB"] * 2,
        "least that can run": ["3.00 MiB"] * 2,
        "reloaded": ["4.00 MiB"] * 2,
        "offloaded": ["5.00 MiB"] * 2,
        "plans": ["6"] * 2,
        "runs": ["7"] * 2,
        "without a plan": ["8"] * 2,
    }
