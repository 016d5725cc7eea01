"""A curve plans no budget twice, and every form of the weights under the same budgets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_finepage.cli.curve import Planner, common_budgets


class Modelled:
    """Plans at once: a budget gives as many tokens a second, but for a step in between."""

    profile = SimpleNamespace(capacity_bytes=100)

    def __init__(self) -> None:
        self.asked: list[int] = []

    def ends(self, policy: str) -> tuple[int, int]:
        return 10, 20

    def at(self, budget: int) -> Modelled:
        self.asked.append(budget)
        self.budget = budget
        return self

    def planned(self, policy: str) -> Any:
        figures = self.figures(float(self.budget))
        return SimpleNamespace(figures=figures), SimpleNamespace(figures=figures)

    def figures(self, speed: float) -> Any:
        numbers = ("lower_bound_ns", "predicted_ns", "reloaded_bytes")
        return SimpleNamespace(
            kv_on_host=False, batch=1, tokens_per_s=speed, **dict.fromkeys(numbers, 1)
        )


def test_no_budget_is_planned_twice() -> None:
    modelled: Any = Modelled()
    planner = Planner("finepage", modelled)
    points = [planner.point(budget) for budget in (10, 20, 10, 50, 200)]
    assert modelled.asked == [10, 20]  # 20 bytes have room for everything
    assert [p.budget_bytes for p in points] == [10, 20, 10, 50, 200]
    assert [p.tokens_per_s for p in points] == [10, 20, 10, 20, 20]
    assert [p.fits for p in points] == [True] * 4 + [False]


@pytest.mark.parametrize(
    ("ends", "num_points", "budgets"),
    [
        ([(10, 20)], 3, [10, 15, 20]),
        ([(10, 20)], 2, [10, 20]),
        ([(10, 20), (0, 40)], 6, [0, 10, 15, 20, 40]),
        ([(10, 20), (0, 40), (4, 20)], 2, [0, 4, 10, 20, 40]),
    ],
)
def test_budgets_are_evenly_spread_over_what_each_form_can_use(
    ends: list[tuple[int, int]], num_points: int, budgets: list[int]
) -> None:
    assert common_budgets(ends, num_points) == budgets
