"""The table over ranks: each figure in its row and column."""

from __future__ import annotations

from collections.abc import Sequence

from ds_finepage.runtime.rank_table import rank_table
from ds_finepage.runtime.ranks import Ranks
from ds_finepage.runtime.stats import PassStats, Stats

MIB = 1 << 20


def one_pass(least_bytes: int, num_runs: int) -> PassStats:
    return PassStats(
        name="decode",
        num_tasks=1,
        arena_bytes=MIB,
        non_arena_bytes=MIB,
        min_budget_bytes=least_bytes,
        needed_budget_bytes=9 * MIB,
        num_runs=num_runs,
    )


STATS = Stats(
    weight_bytes=1 * MIB,
    budget_bytes=2 * MIB,
    passes=(one_pass(3 * MIB, 5), one_pass(MIB, 2)),
    reloaded_bytes=4 * MIB,
    offloaded_bytes=5 * MIB,
    num_plans=6,
    num_unplanned_graphs=7,
    num_unplanned_modules=1,
    num_captures=20,
    plan_ns=21,
    num_forgotten=22,
    num_resident_runs=23,
    num_caches_on_host=24,
    unplanned_reasons=(),
)


class Twice(Ranks):
    def of_all(self, numbers: Sequence[int]) -> list[list[int]]:
        return [list(numbers), [2 * number for number in numbers]]


def test_each_rank_has_a_row() -> None:
    table = rank_table(Twice(), STATS)
    assert str(table.title) == "2 ranks"
    assert {str(column.header): list(column.cells) for column in table.columns} == {
        "rank": ["0", "1"],
        "weights": ["1.00 MiB", "2.00 MiB"],
        "budget": ["2.00 MiB", "4.00 MiB"],
        "least that can run": ["3.00 MiB", "6.00 MiB"],
        "reloaded": ["4.00 MiB", "8.00 MiB"],
        "offloaded": ["5.00 MiB", "10.00 MiB"],
        "plans": ["6", "12"],
        "runs": ["7", "14"],
        "without a plan": ["8", "16"],
    }
