"""The price list of a model."""

from __future__ import annotations

import dataclasses

from rich.console import Console

from ds_finepage.reporting.curve import (
    Curve,
    CurvePoint,
    at_least_as_good,
)


def point(budget: int, speed: float, first: int = 100) -> CurvePoint:
    return CurvePoint(
        budget_bytes=budget,
        fits=True,
        kv_on_host=False,
        tokens_per_s=speed,
        tokens_per_s_bound=speed,
        first_token_ns=first,
        first_token_bound_ns=first,
        decode_reloaded_bytes=int(speed),
        prefill_reloaded_bytes=first,
    )


def test_a_larger_budget_can_use_a_smaller_ones_plan() -> None:
    found = at_least_as_good([point(1, 5.0, 50), point(2, 4.0, 60), point(3, 6.0, 40)])
    assert [p.tokens_per_s for p in found] == [5, 5, 6]
    assert [p.first_token_ns for p in found] == [50, 50, 40]
    assert [p.decode_reloaded_bytes for p in found] == [5, 5, 6]
    assert [p.budget_bytes for p in found] == [1, 2, 3]


def test_the_plan_of_a_smaller_budget_brings_its_place_for_the_kv_cache() -> None:
    on_host = dataclasses.replace(point(1, 5.0), kv_on_host=True)
    found = at_least_as_good([on_host, point(2, 4.0), point(3, 6.0)])
    assert [p.kv_on_host for p in found] == [True, True, False]


CURVE = Curve(
    model="m",
    batch=1,
    seq=64,
    policy="finepage",
    hardware="t4",
    weight_bytes=4,
    capacity_bytes=4,
    points=(point(1, 1.0, 50), point(2, 4.0, 40), point(3, 4.01, 40)),
)


def test_the_table_has_a_row_a_budget() -> None:
    console = Console(width=200)
    with console.capture() as text:
        console.print(CURVE.to_table())
    rows = [line for line in text.get().splitlines() if " B " in line]
    assert len(rows) == 3 and "1.00" in rows[0] and "4.01" in rows[2]
