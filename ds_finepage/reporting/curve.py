"""Speed against budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.table import Table

from ds_finepage.reporting.figures import of_ranks
from ds_finepage.reporting.tabular import table_of
from ds_finepage.units import format_bytes, format_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """Speed and bytes under one budget: of a steady decode step, and of the prefill before it."""

    budget_bytes: int
    fits: bool  # the device has that much memory
    kv_on_host: bool  # the KV cache of the decode step is in host memory
    tokens_per_s: float
    tokens_per_s_bound: float  # of one batch at a time: no such schedule is faster
    first_token_ns: int
    first_token_bound_ns: int
    decode_reloaded_bytes: int
    prefill_reloaded_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The price list of one model on one machine; points are sorted by budget.

    ``weights`` names the form of the weights: "bf16", "int8" or "int4"; None if none was asked for.
    Where a model is cut over ``num_ranks``, bytes are those of one rank, and speeds those of all.
    """

    model: str
    batch: int
    seq: int
    policy: str
    hardware: str
    weight_bytes: int
    capacity_bytes: int
    points: tuple[CurvePoint, ...]
    weights: str | None = None
    num_ranks: int = 1

    @property
    def title(self) -> str:
        """Model, form of the weights if it was named, shape, policy and machine."""
        form = f" in {self.weights}" if self.weights else ""
        return (
            f"{self.model}{form}, batch {self.batch}, sequence {self.seq}, {self.policy} on "
            f"{self.hardware}{of_ranks(self.num_ranks)}"
        )

    def to_table(self) -> Table:
        """Return the points as a table for the terminal."""
        return table_of(self.title, _COLUMNS, self.points)


_COLUMNS: tuple[tuple[str, Callable[[CurvePoint], str]], ...] = (
    ("budget", lambda p: format_bytes(p.budget_bytes)),
    ("tok/s", lambda p: f"{p.tokens_per_s:.2f}"),
    ("at most", lambda p: f"{p.tokens_per_s_bound:.2f}"),
    ("first token", lambda p: format_ns(p.first_token_ns)),
    ("at least", lambda p: format_ns(p.first_token_bound_ns)),
    ("reloaded a token", lambda p: format_bytes(p.decode_reloaded_bytes)),
    ("KV cache", lambda p: "host memory" if p.kv_on_host else "device"),
    ("", lambda p: "" if p.fits else "more than the device has"),
)


def price_table(curves: Sequence[Curve]) -> Table:
    """Return the speeds that each budget buys in several forms of the weights.

    Args:
        curves: One for each form; the points of all are at the same budgets, and begin where the
            form can run.
    """
    columns: list[tuple[str, Callable[[int], str]]] = [("budget", format_bytes)]
    for curve in curves:
        points = {point.budget_bytes: point for point in curve.points}
        columns += [
            (f"{curve.weights} tok/s", partial(_cell, points, "tokens_per_s", "{:.2f}".format)),
            ("first token", partial(_cell, points, "first_token_ns", format_ns)),
        ]
    budgets = sorted({point.budget_bytes for curve in curves for point in curve.points})
    return table_of(replace(curves[0], weights=None).title, columns, budgets)


def _cell(
    points: Mapping[int, CurvePoint], name: str, show: Callable[[Any], str], budget_bytes: int
) -> str:
    point = points.get(budget_bytes)
    return "-" if point is None else show(getattr(point, name))


def at_least_as_good(points: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
    """Let each budget use the plan of a smaller one if that is faster."""
    best: list[CurvePoint] = []
    for point in points:
        if best and best[-1].tokens_per_s > point.tokens_per_s:
            point = replace(
                point,
                kv_on_host=best[-1].kv_on_host,
                tokens_per_s=best[-1].tokens_per_s,
                decode_reloaded_bytes=best[-1].decode_reloaded_bytes,
            )
        if best and best[-1].first_token_ns < point.first_token_ns:
            point = replace(
                point,
                first_token_ns=best[-1].first_token_ns,
                prefill_reloaded_bytes=best[-1].prefill_reloaded_bytes,
            )
        best.append(point)
    return tuple(best)
