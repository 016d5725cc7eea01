"""Show speed against budget: tokens a second and time to the first token.

The price list of a model on a machine. Budgets go from the smallest that can run to the one under
which all weights stay resident, even if the device has less memory. Under small budgets the KV
cache is in host memory, as in a run. Several forms of the weights are planned under the same
budgets, and shown side by side.

Exit status: 0; 2 for an option that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ds_finepage.capture.shipped import config_text
from ds_finepage.cli import drafts, options, output, quieten_libraries
from ds_finepage.cli.grid import Point, is_modelled_packing, packing_note
from ds_finepage.errors import ConfigError
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.policies import policy_named
from ds_finepage.reporting.figures import of_ranks
from ds_finepage.reporting.tabular import table_of
from ds_finepage.units import NS_PER_S, format_bytes, format_ns

if TYPE_CHECKING:
    from ds_finepage.modeller import Modeller


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    options.add_model(parser)
    options.add_weights(parser, many=True)
    options.add_ranks(parser)
    parser.add_argument("--points", type=int, default=8, help="budgets to plan (8)")
    options.add_host_memory(parser)
    drafts.add_draft(parser)
    output.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan under many budgets, print the list."""
    config_text(arguments.model)  # refuses one that is not there
    options.require_counts(arguments, "batch", "seq", "ranks")
    policy_named(arguments.policy)  # refuses one that is not there
    forms = options.weights_of(arguments)
    drafts.acceptances_of(arguments)
    if arguments.points < 2:
        raise ConfigError(f"--points: {arguments.points} is not a curve. Write 2 or more.")
    options.note_link(arguments.ranks, options.machine_of(arguments))
    settings = {
        "model": arguments.model,
        "batch": arguments.batch,
        "prompt_tokens": arguments.seq,
        "hardware": arguments.hardware,
        **options.settings_of(arguments),
    }
    made = [(arguments.policy, tuple({**settings, "weights": form}.items())) for form in forms]
    curves = make_curves(made, arguments.points)
    points = drafts.points_of(arguments, [p.budget_bytes for p in curves[0].points])
    if arguments.json:
        found = [asdict(curve) | drafts.as_json(arguments, points) for curve in curves]
        print(json.dumps(found if len(found) > 1 else found[0], indent=2))
        return 0
    output.show(price_table(curves) if len(curves) > 1 else curves[0].to_table())
    drafts.show(arguments, points)
    for curve in curves:
        if is_modelled_packing(arguments.policy, curve.weights):
            print(packing_note(str(curve.weights)))
    return 0


def make_curves(made: Sequence[Making], num_points: int) -> list[Curve]:
    """Plan each form of a model's weights under the same budgets, as far as it can run.

    Several forms are planned side by side, in processes.

    Args:
        made: How to make the planner of each form.
        num_points: Budgets to plan.

    Raises:
        ConfigError: The model, its form or a size cannot be used.
        CaptureError: The forward cannot be written as a taskgraph.
    """
    if len(made) == 1:
        ends = [ends_of(made[0])]
        asked = output.with_progress(common_budgets(ends, num_points))
        return [curve_through([point_of(made[0], budget) for budget in asked], made[0])]
    with ExitStack() as stack:
        processes = partial(ProcessPoolExecutor, 1, get_context("spawn"), initializer=begin)
        forms = [(stack.enter_context(processes()), each) for each in made]
        begun = [pool.submit(ends_of, each) for pool, each in forms]
        ends = [future.result() for future in begun]
        futures = [
            (each, pool.submit(point_of, each, budget))
            for budget in common_budgets(ends, num_points)
            for (pool, each), (least, _) in zip(forms, ends, strict=True)
            if budget >= least
        ]
        points: dict[Making, list[Point]] = {each: [] for each in made}
        for each, future in output.with_progress(futures):
            points[each].append(future.result())
        return [curve_through(found, each) for each, found in points.items()]


Making = tuple[str, tuple[tuple[str, Any], ...]]
"""A policy, and the settings of a :class:`Modeller`."""


@cache
def modeller_of(settings: tuple[tuple[str, Any], ...]) -> Modeller:
    """Capture both passes of a model; a process captures them once."""
    from ds_finepage.modeller import Modeller  # imports torch: check the options first

    return Modeller(**dict(settings))


def begin() -> None:
    """Prepare a process: it ends with an interrupt, and hides warnings as the command does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    quieten_libraries()


@cache
def ends_of(made: Making) -> tuple[int, int]:
    """Return the smallest budget, and the one that pages nothing."""
    policy, settings = made
    return modeller_of(settings).ends(policy)


@cache
def planned(made: Making, budget_bytes: int) -> Point:
    """Plan both passes under a budget; none is planned twice."""
    policy, settings = made
    return Point.of(*modeller_of(settings).at(budget_bytes).planned(policy))


def point_of(made: Making, budget_bytes: int) -> Point:
    """Return the point of a budget; those with room for everything have one plan."""
    enough = min(budget_bytes, ends_of(made)[1])
    return replace(planned(made, enough), budget_bytes=budget_bytes)


def curve_through(points: Sequence[Point], made: Making) -> Curve:
    """Return the curve of one form through its points."""
    policy, settings = made[0], dict(made[1])
    profile = load_profile(settings["hardware"])
    return Curve(
        model=settings["model"],
        batch=settings["batch"],
        seq=settings["prompt_tokens"],
        policy=policy,
        hardware=profile.name,
        weight_bytes=points[0].weight_bytes,
        capacity_bytes=profile.capacity_bytes,
        points=tuple(points),
        weights=settings["weights"],
        num_ranks=settings["num_ranks"],
    )


def common_budgets(ends: Sequence[tuple[int, int]], num_points: int) -> list[int]:
    """Return budgets for all forms: evenly spread over what each one can use."""
    steps = max(1, -(-num_points // len(ends)) - 1)
    spread = ((least, most - least, i) for least, most in ends for i in range(steps + 1))
    return sorted({least + extent * i // steps for least, extent, i in spread})


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
    points: tuple[Point, ...]
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
        lacks = "more than the device has"
        columns: tuple[tuple[str, Callable[[Point], str]], ...] = (
            ("budget", lambda p: format_bytes(p.budget_bytes)),
            ("tok/s", lambda p: f"{p.tokens_per_s:.2f}"),
            ("at most", lambda p: f"{self.batch * NS_PER_S / max(1, p.decode_bound_ns):.2f}"),
            ("first token", lambda p: format_ns(p.first_token_ns)),
            ("at least", lambda p: format_ns(p.first_token_bound_ns)),
            ("reloaded a token", lambda p: format_bytes(p.decode_reloaded_bytes)),
            ("KV cache", lambda p: "host memory" if p.decode_kv_on_host else "device"),
            ("", lambda p: lacks if p.budget_bytes > self.capacity_bytes else ""),
        )
        return table_of(self.title, columns, self.points)


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
    points: Mapping[int, Point], name: str, show: Callable[[Any], str], budget_bytes: int
) -> str:
    point = points.get(budget_bytes)
    return "-" if point is None else show(getattr(point, name))
