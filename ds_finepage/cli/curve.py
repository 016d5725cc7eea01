"""Show speed against budget: tokens a second and time to the first token, and where the knees are.

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
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from itertools import pairwise
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

from ds_finepage.capture.shipped import require_model
from ds_finepage.cli import options, output, quieten_libraries
from ds_finepage.cli.grid_rows import is_modelled_packing, packing_note
from ds_finepage.cli.progress import Progress
from ds_finepage.errors import ConfigError
from ds_finepage.graph.profiles import load_profile
from ds_finepage.reporting.curve import (
    Curve,
    CurvePoint,
    Need,
    at_least_as_good,
    price_table,
    round_speeds,
)
from ds_finepage.reporting.figures import NS_PER_S

if TYPE_CHECKING:
    from ds_finepage.modeller import Modeller

MOST_SPEEDS = 4
"""Speeds to find budgets for, if the user names none."""

MARGIN = 0.15
"""Of the way to the next point: a budget for a speed is that much larger than it would have to be
if the time of a pass fell evenly."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    options.add_model(parser)
    options.add_weights(parser, many=True)
    options.add_ranks(parser)
    parser.add_argument("--points", type=int, default=8, help="budgets to plan (8)")
    parser.add_argument(
        "--tokens-per-s",
        metavar="LIST",
        help="speeds to find budgets for, with commas in between; by default round numbers",
    )
    options.add_host_memory(parser)
    output.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan under many budgets, print the list."""
    require_model(arguments.model)
    options.require_counts(arguments, "batch", "seq", "ranks")
    options.require_policies([arguments.policy])
    forms = options.weights_of(arguments)
    if arguments.points < 2:
        raise ConfigError(f"--points: {arguments.points} is not a curve. Write 2 or more.")
    options.note_link(arguments.ranks, load_profile(arguments.hardware))
    speeds = speeds_of(arguments.tokens_per_s)
    settings = {
        "model": arguments.model,
        "batch": arguments.batch,
        "prompt_tokens": arguments.seq,
        "hardware": arguments.hardware,
        "split": not arguments.no_split,
        "host_memory_bytes": options.host_memory_of(arguments.host_memory),
        "weights_group": arguments.weights_group,
        "num_ranks": arguments.ranks,
    }
    made = [(arguments.policy, tuple({**settings, "weights": form}.items())) for form in forms]
    curves = make_curves(made, arguments.points, speeds)
    if arguments.json:
        found = [curve.to_dict() for curve in curves]
        print(json.dumps(found if len(found) > 1 else found[0], indent=2))
        return 0
    output.show(price_table(curves) if len(curves) > 1 else curves[0].to_table())
    for curve in curves:
        form = f"{curve.weights}: " if len(curves) > 1 else ""
        for sentence in curve.in_words():
            print(f"{form}{sentence}")
        if is_modelled_packing(arguments.policy, curve.weights):
            print(packing_note(str(curve.weights)))
    return 0


def make_curves(
    made: Sequence[Making], num_points: int, speeds: Sequence[float] | None
) -> list[Curve]:
    """Plan the model in each form of its weights; several forms side by side, in processes.

    Args:
        made: How to make the planner of each form.
        num_points: Budgets to plan.
        speeds: Tokens a second to find budgets for; None chooses round numbers.

    Raises:
        ConfigError: The model, its form or a size cannot be used.
        CaptureError: The forward cannot be written as a taskgraph.
    """
    if len(made) == 1:
        with Progress(num_points) as shown:
            planner = planner_of(*made[0])
            return [planner.curve(planner.bisected(num_points, shown.advance), speeds)]
    with ExitStack() as stack:
        pools = [stack.enter_context(process()) for _ in made]
        begun = [pool.submit(ends_of, each) for pool, each in zip(pools, made, strict=True)]
        ends = [future.result() for future in begun]
        budgets = common_budgets(ends, num_points)
        own = [[b for b in budgets if b >= least] for least, _ in ends]
        shown = stack.enter_context(Progress(sum(map(len, own))))
        curves = []
        for pool, each, some in zip(pools, made, own, strict=True):
            for budget in some:
                pool.submit(plan_point, each, budget).add_done_callback(shown.advance)
            curves.append(pool.submit(curve_of, each, some, speeds))
        return [future.result() for future in curves]


class Planner:
    """Plans both passes of a model under many budgets, and none twice."""

    def __init__(self, policy: str, modeller: Modeller) -> None:
        """Take a model.

        Args:
            policy: A key of ``POLICIES``.
            modeller: Plans its passes.
        """
        self.ends = modeller.ends(policy)
        self._modeller = modeller
        self._policy = policy
        self._points: dict[int, CurvePoint] = {}

    def point(self, budget_bytes: int) -> CurvePoint:
        """Plan both passes; budgets with room for everything have one plan."""
        enough = min(budget_bytes, self.ends[1])
        if enough not in self._points:
            self._points[enough] = self._planned(enough)
        fits = budget_bytes <= self._modeller.profile.capacity_bytes
        return replace(self._points[enough], budget_bytes=budget_bytes, fits=fits)

    def _planned(self, budget_bytes: int) -> CurvePoint:
        planned = self._modeller.at(budget_bytes).planned(self._policy)
        prefill, decode = (each.figures for each in planned)
        return CurvePoint(
            budget_bytes=budget_bytes,
            fits=True,
            kv_on_host=decode.kv_on_host,
            tokens_per_s=decode.tokens_per_s,
            tokens_per_s_bound=decode.batch * NS_PER_S / max(1, decode.lower_bound_ns),
            first_token_ns=prefill.predicted_ns,
            first_token_bound_ns=prefill.lower_bound_ns,
            decode_reloaded_bytes=decode.reloaded_bytes,
            prefill_reloaded_bytes=prefill.reloaded_bytes,
        )

    def need(self, speed: float, points: Sequence[CurvePoint]) -> Need | None:
        """Find a budget that gives a speed; return None if no budget does.

        Between two points the time of a pass falls nearly evenly with the budget. The returned
        budget has been planned: the one that follows from that, with a margin, or the next point.

        Args:
            speed: Tokens a second.
            points: The points, sorted by budget.
        """
        above = next((i for i, p in enumerate(points) if p.tokens_per_s >= speed), None)
        if above is None:
            return None
        high = points[above]
        if above == 0:
            return Need(tokens_per_s=speed, budget_bytes=high.budget_bytes)
        low = points[above - 1]
        slow, fast = 1 / low.tokens_per_s, 1 / high.tokens_per_s
        share = (slow - 1 / speed) / (slow - fast)
        share += MARGIN * (1 - share)
        budget = low.budget_bytes + int(share * (high.budget_bytes - low.budget_bytes))
        step = self._modeller.at(budget).step(self._policy)
        if step.figures.tokens_per_s < speed:
            budget = high.budget_bytes
        return Need(tokens_per_s=speed, budget_bytes=budget)

    def bisected(self, num_points: int, advance: Callable[[], None]) -> list[CurvePoint]:
        """Plan from the smallest budget to the one that pages nothing.

        Two thirds of the budgets are spread evenly. The others go where the speed jumps most.

        Args:
            num_points: Budgets to plan.
            advance: Called after each.
        """
        steps = max(1, num_points * 2 // 3 - 1)
        points = []
        for budget in spread(*self.ends, steps):
            points.append(self.point(budget))
            advance()
        while len(points) < num_points:
            jumps = [b.tokens_per_s - a.tokens_per_s for a, b in pairwise(points)]
            at = jumps.index(max(jumps))
            budget = (points[at].budget_bytes + points[at + 1].budget_bytes) // 2
            if budget == points[at].budget_bytes:
                break  # nothing lies between them
            points.insert(at + 1, self.point(budget))
            advance()
        return points

    def curve(self, planned: Sequence[CurvePoint], speeds: Sequence[float] | None) -> Curve:
        """Return the curve through points, with the budgets that speeds need.

        Args:
            planned: The points.
            speeds: Tokens a second; None chooses round numbers.
        """
        points = at_least_as_good(planned)
        ends = points[0].tokens_per_s, points[-1].tokens_per_s
        needs = [self.need(speed, points) for speed in speeds or round_speeds(*ends, MOST_SPEEDS)]
        decode, profile = self._modeller.decode, self._modeller.profile
        return Curve(
            model=decode.model,
            batch=decode.batch,
            seq=decode.seq,
            policy=self._policy,
            hardware=profile.name,
            weight_bytes=decode.graph.weight_bytes,
            capacity_bytes=profile.capacity_bytes,
            points=points,
            needs=tuple(need for need in needs if need is not None),
            weights=self._modeller.weights,
            num_ranks=decode.num_ranks,
        )


Making = tuple[str, tuple[tuple[str, Any], ...]]
"""A policy, and the settings of a :class:`Modeller`."""


@cache
def planner_of(policy: str, settings: tuple[tuple[str, Any], ...]) -> Planner:
    """Capture both passes of a model; a process captures them once."""
    from ds_finepage.modeller import Modeller  # imports torch: check the options first

    return Planner(policy, Modeller(**dict(settings)))


def process() -> ProcessPoolExecutor:
    """Start a process that works for one form of the weights."""
    return ProcessPoolExecutor(1, get_context("spawn"), initializer=begin)


def begin() -> None:
    """Prepare a process: it ends with an interrupt, and hides warnings as the command does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    quieten_libraries()


def ends_of(made: Making) -> tuple[int, int]:
    """Return the smallest budget, and the one that pages nothing."""
    return planner_of(*made).ends


def plan_point(made: Making, budget_bytes: int) -> None:
    """Plan under a budget; the process remembers the point."""
    planner_of(*made).point(budget_bytes)


def curve_of(made: Making, budgets: Sequence[int], speeds: Sequence[float] | None) -> Curve:
    """Return the curve of one form through some budgets."""
    planner = planner_of(*made)
    return planner.curve([planner.point(budget) for budget in budgets], speeds)


def spread(least: int, most: int, steps: int) -> list[int]:
    """Return budgets from one to another, in even steps."""
    return [least + (most - least) * i // steps for i in range(steps + 1)]


def common_budgets(ends: Sequence[tuple[int, int]], num_points: int) -> list[int]:
    """Return budgets for all forms: evenly spread over what each one can use."""
    steps = max(1, (num_points + 1) // len(ends) - 1)
    return sorted({budget for each in ends for budget in spread(*each, steps)})


def speeds_of(text: str | None) -> list[float] | None:
    """Read a list of speeds.

    Raises:
        ConfigError: An element is not a positive number.
    """
    if text is None:
        return None
    speeds = []
    for part in options.names_of(text, "--tokens-per-s"):
        try:
            speed = float(part)
        except ValueError:
            speed = 0.0
        if not 0 < speed < float("inf"):
            raise ConfigError(f"--tokens-per-s: {part!r} is not a number above 0.")
        speeds.append(speed)
    return speeds
