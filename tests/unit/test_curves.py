"""The price list of a model: no budget is planned twice, and none is worse than a smaller one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ds_finepage.cli.curve import Curve, common_budgets, point_of
from ds_finepage.cli.grid import Point
from tests.unit.points import point


class Modelled:
    """Plans at once: a budget gives as many tokens a second, but for a step in between."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def ends(self, policy: str) -> tuple[int, int]:
        return 10, 20

    def at(self, budget: int) -> Modelled:
        self.asked.append(budget)
        self.budget = budget
        return self

    def planned(self, policy: str) -> Any:
        names = Point.__dataclass_fields__.keys() | {"predicted_ns", "lower_bound_ns", "kv_on_host"}
        numbers = {**dict.fromkeys(names, 1), "reloaded_bytes": 1, "tokens_per_s": self.budget}
        found = SimpleNamespace(engine=None, figures=SimpleNamespace(**numbers))
        return found, found


def test_no_budget_is_planned_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    modelled = Modelled()
    captured: list[object] = []
    monkeypatch.setattr(
        "ds_finepage.modeller.Modeller", lambda **given: captured.append(given) or modelled
    )
    made = ("finepage", (("model", "of this test"),))
    points = [point_of(made, budget) for budget in (10, 20, 10, 50, 200)]
    assert captured == [{"model": "of this test"}]
    assert modelled.asked == [10, 20]  # 20 bytes have room for everything
    assert [p.budget_bytes for p in points] == [10, 20, 10, 50, 200]
    assert [p.tokens_per_s for p in points] == [10, 20, 10, 20, 20]


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


def at(budget: int, speed: float, first: int = 100) -> Point:
    return point(
        budget_bytes=budget,
        tokens_per_s=speed,
        first_token_ns=first,
        decode_reloaded_bytes=int(speed),
    )


def test_the_table_has_a_row_a_budget_and_marks_those_beyond_the_card() -> None:
    curve = Curve(
        model="m",
        batch=2,
        seq=64,
        policy="finepage",
        hardware="t4",
        weight_bytes=4,
        capacity_bytes=2,
        points=(at(1, 1.0, 50), at(2, 4.0, 40), at(3, 4.01, 40)),
    )
    console = Console(width=200)
    with console.capture() as text:
        console.print(curve.to_table())
    rows = [line for line in text.get().splitlines() if " B " in line]
    assert len(rows) == 3 and "1.00" in rows[0] and "4.01" in rows[2]
    assert [("more than the device has" in row) for row in rows] == [False, False, True]
    assert all("200000000.00" in row for row in rows)  # at most: two tokens in 10 ns
