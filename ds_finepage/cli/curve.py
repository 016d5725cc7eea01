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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ds_finepage.capture.shipped import require_model
from ds_finepage.cli import options, output
from ds_finepage.cli.grid_rows import is_modelled_packing, packing_note
from ds_finepage.errors import ConfigError
from ds_finepage.files import write_file
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.profiles import load_profile
from ds_finepage.reporting.curve import (
    Curve,
    CurvePoint,
    Need,
    at_least_as_good,
    price_table,
    round_speeds,
)
from ds_finepage.reporting.drawing import require_packages
from ds_finepage.reporting.figures import NS_PER_S
from ds_finepage.units import GIB

if TYPE_CHECKING:
    from ds_finepage.whatif import CapturedModel, PlannedModel

PICTURES = ("png", "svg", "pdf")

MAX_ATTEMPTS = 4
"""Most budgets to plan for one speed, in rising order."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    options.add_model(parser)
    options.add_weights(parser, many=True)
    options.add_ranks(parser)
    parser.add_argument("--points", type=int, default=12, help="budgets to plan (12)")
    parser.add_argument(
        "--tokens-per-s",
        metavar="LIST",
        help="speeds to find budgets for, with commas in between; by default round numbers",
    )
    options.add_host_memory(parser)
    output.add_json(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: a .png, .svg or .pdf")
    options.add_force(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan under many budgets, print the list, draw it."""
    require_model(arguments.model)
    options.require_counts(arguments, "batch", "seq", "ranks")
    options.require_policies([arguments.policy])
    forms = options.weights_of(arguments)
    if arguments.points < 2:
        raise ConfigError(f"--points: {arguments.points} is not a curve. Write 2 or more.")
    profile = load_profile(arguments.hardware)
    options.note_link(arguments.ranks, profile)
    speeds = speeds_of(arguments.tokens_per_s)
    host_memory_bytes = options.host_memory_of(arguments.host_memory)
    if arguments.plot is not None:
        require_packages("--plot", "matplotlib")
        picture_kind(arguments.plot)
        options.require_writable(arguments.plot, force=arguments.force)

    planners = [planner_of(arguments, form, profile, host_memory_bytes) for form in forms]
    budgets = common_budgets(planners, arguments.points) if len(forms) > 1 else None
    curves = [make_curve(planner, arguments.points, speeds, budgets) for planner in planners]
    if arguments.plot is not None:
        draw(curves, arguments.plot)
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
    if arguments.plot is not None:
        print(f"picture: {arguments.plot}")
    return 0


def planner_of(
    arguments: argparse.Namespace,
    form: str | None,
    profile: HardwareProfile,
    host_memory_bytes: int | None,
) -> Planner:
    """Capture both passes of the model.

    Args:
        arguments: The options.
        form: The form of the weights; None leaves them as the model has them.
        profile: The machine.
        host_memory_bytes: Its host memory; None if that is not known.

    Raises:
        ConfigError: The model, its form or a size cannot be used.
        CaptureError: The forward cannot be written as a taskgraph.
    """
    from ds_finepage.whatif import capture_model  # imports torch: check the options first

    prefill, decode = (
        capture_model(
            arguments.model,
            phase=phase,
            batch=arguments.batch,
            seq=arguments.seq,
            profile=profile,
            weights=form,
            weights_group=arguments.weights_group,
            num_ranks=arguments.ranks,
        )
        for phase in options.PHASES
    )
    return Planner(
        prefill=prefill,
        decode=decode,
        profile=profile,
        policy=arguments.policy,
        split=not arguments.no_split,
        host_memory_bytes=host_memory_bytes,
        weights=form,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planner:
    """Plans both passes of a model under any budget."""

    prefill: CapturedModel
    decode: CapturedModel
    profile: HardwareProfile
    policy: str
    split: bool
    host_memory_bytes: int | None = None
    weights: str | None = None

    def plan(self, captured: CapturedModel, budget_bytes: int) -> PlannedModel:
        """Plan one pass."""
        from ds_finepage.whatif import plan_captured

        return plan_captured(
            captured,
            budget_bytes=budget_bytes,
            profile=self.profile,
            policy=self.policy,
            split=self.split,
            host_memory_bytes=self.host_memory_bytes,
            as_in_a_run=True,
        )

    def plan_decode(self, budget_bytes: int) -> PlannedModel:
        """Plan a decode step; its KV cache is where the prefill has left it."""
        from ds_finepage.whatif import form_that_fits

        before = form_that_fits(
            self.prefill, budget_bytes=budget_bytes, policy=self.policy, split=self.split
        )
        captured = self.decode.on_host if before.kv_on_host else None
        return self.plan(captured or self.decode, budget_bytes)

    def point(self, budget_bytes: int) -> CurvePoint:
        """Plan both passes."""
        decode = self.plan_decode(budget_bytes).figures
        prefill = self.plan(self.prefill, budget_bytes).figures
        return CurvePoint(
            budget_bytes=budget_bytes,
            fits=budget_bytes <= self.profile.capacity_bytes,
            kv_on_host=decode.kv_on_host,
            tokens_per_s=decode.tokens_per_s,
            tokens_per_s_bound=decode.batch * NS_PER_S / max(1, decode.lower_bound_ns),
            first_token_ns=prefill.predicted_ns,
            first_token_bound_ns=prefill.lower_bound_ns,
            decode_reloaded_bytes=decode.reloaded_bytes,
            prefill_reloaded_bytes=prefill.reloaded_bytes,
        )

    def ends(self) -> tuple[int, int]:
        """Return the smallest budget that can run, and the one that pages nothing."""
        from ds_finepage.whatif import least_budget_bytes

        both = (self.prefill, self.decode)
        least = max(least_budget_bytes(captured, policy=self.policy) for captured in both)
        return least, max(captured.needs.needed_budget_bytes for captured in both)

    def points(self, num_points: int) -> list[CurvePoint]:
        """Plan from the smallest budget to the one that pages nothing.

        Two thirds of the budgets are spread evenly. The others go where the speed jumps most.
        """
        least, most = self.ends()
        steps = max(1, num_points * 2 // 3 - 1)
        even = [least + (most - least) * i // steps for i in range(steps + 1)]
        points: list[CurvePoint] = []
        for number in options.with_progress(range(num_points)):
            if number <= steps:
                budget = even[number]
            else:
                jumps = [b.tokens_per_s - a.tokens_per_s for a, b in pairwise(points)]
                at = jumps.index(max(jumps))
                budget = (points[at].budget_bytes + points[at + 1].budget_bytes) // 2
            if budget not in [p.budget_bytes for p in points]:
                points.append(self.point(budget))
                points.sort(key=lambda p: p.budget_bytes)
        return points

    def points_at(self, budgets: list[int]) -> list[CurvePoint]:
        """Plan under some budgets; those that are too small are left out."""
        least, _ = self.ends()
        enough = [budget for budget in budgets if budget >= least]
        return [self.point(budget) for budget in options.with_progress(enough)]

    def need(self, speed: float, points: tuple[CurvePoint, ...]) -> Need | None:
        """Find a budget that gives a speed; return None if no budget does.

        Between two points the time of a pass falls nearly evenly with the budget. The returned
        budget has been planned.
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
        span = high.budget_bytes - low.budget_bytes
        for attempt in range(MAX_ATTEMPTS):
            budget = low.budget_bytes + int(span * (share + attempt * (1 - share) / MAX_ATTEMPTS))
            if self.plan_decode(budget).figures.tokens_per_s >= speed:
                return Need(tokens_per_s=speed, budget_bytes=budget)
        return Need(tokens_per_s=speed, budget_bytes=high.budget_bytes)


def common_budgets(planners: Sequence[Planner], num_points: int) -> list[int]:
    """Return budgets for all forms: evenly spread over what each one can use."""
    steps = max(1, num_points // len(planners) - 1)
    found = set()
    for planner in planners:
        least, most = planner.ends()
        found |= {least + (most - least) * i // steps for i in range(steps + 1)}
    return sorted(found)


def make_curve(
    planner: Planner,
    num_points: int,
    speeds: list[float] | None,
    budgets: list[int] | None = None,
) -> Curve:
    """Plan the points, then the budgets of some speeds.

    Args:
        planner: Plans both passes.
        num_points: Budgets to plan.
        speeds: Tokens a second to find budgets for; None chooses round numbers.
        budgets: The budgets; None chooses them.
    """
    found = planner.points(num_points) if budgets is None else planner.points_at(budgets)
    points = at_least_as_good(found)
    if speeds is None:
        speeds = round_speeds(points[0].tokens_per_s, points[-1].tokens_per_s)
    needs = [planner.need(speed, points) for speed in speeds]
    decode = planner.decode
    return Curve(
        model=decode.model,
        batch=decode.batch,
        seq=decode.seq,
        policy=planner.policy,
        hardware=planner.profile.name,
        weight_bytes=decode.graph.weight_bytes,
        capacity_bytes=planner.profile.capacity_bytes,
        points=points,
        needs=tuple(need for need in needs if need is not None),
        weights=planner.weights,
        num_ranks=decode.num_ranks,
    )


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


def picture_kind(path: Path) -> str:
    """Read the kind of a picture from its name.

    Raises:
        ConfigError: Matplotlib cannot draw it.
    """
    kind = path.suffix.removeprefix(".").lower()
    if kind not in PICTURES:
        raise ConfigError(f"--plot: {path} must end in one of: {', '.join(PICTURES)}")
    return kind


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw speed above time to the first token, with bounds, knees and the device's size."""
    import io

    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8), layout="constrained")
    speed, first = figure.subplots(2, sharex=True)
    for curve in curves:
        budgets = [p.budget_bytes / GIB for p in curve.points]
        label = " in ".join(filter(None, (curve.policy, curve.weights)))
        speed.plot(budgets, [p.tokens_per_s for p in curve.points], marker="o", label=label)
        bounds = [p.tokens_per_s_bound for p in curve.points]
        speed.plot(budgets, bounds, linestyle="--", color="gray")
        for step in curve.steps[1:]:
            speed.axvline(step.from_bytes / GIB, color="tab:orange", alpha=0.5)
        first.plot(budgets, [p.first_token_ns / NS_PER_S for p in curve.points], marker="o")
        bounds = [p.first_token_bound_ns / NS_PER_S for p in curve.points]
        first.plot(budgets, bounds, linestyle="--", color="gray")
    speed.plot([], [], linestyle="--", color="gray", label="bound, one batch at a time")
    speed.set_ylabel("tokens a second")
    first.set_ylabel("seconds to the first token")
    first.set_xlabel("device budget in GiB")
    capacity_bytes = curves[0].capacity_bytes
    largest_bytes = max(curve.points[-1].budget_bytes for curve in curves)
    for axes in (speed, first):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if capacity_bytes <= largest_bytes:
            axes.axvline(capacity_bytes / GIB, color="tab:red", label="the device's memory")
    speed.legend()
    shown = curves[0] if len(curves) == 1 else replace(curves[0], weights=None)
    figure.suptitle(shown.title)
    picture = io.BytesIO()
    figure.savefig(picture, format=picture_kind(path))
    write_file(path, picture.getvalue())
