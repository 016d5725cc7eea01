"""A curve plans no budget twice, and names none that was not planned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ds_finepage.cli.curve import Planner


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

    def step(self, policy: str) -> Any:
        return SimpleNamespace(figures=self.figures(self.budget - 1.0))

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


def test_a_budget_that_misses_its_speed_is_not_named() -> None:
    modelled: Any = Modelled()
    planner = Planner("finepage", modelled)
    points = [planner.point(budget) for budget in (10, 20)]
    need = planner.need(13.0, points)
    assert need is not None and need.budget_bytes == 15  # where a step of 14 was planned
    assert modelled.asked[2:] == [15]
    need = planner.need(19.5, points)
    assert need is not None and need.budget_bytes == 20 and modelled.asked[-1] == 19
