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
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ds_finepage.capture.shipped import require_model
from ds_finepage.cli import options, output
from ds_finepage.cli.grid_rows import is_modelled_packing, packing_note
from ds_finepage.errors import ConfigError
from ds_finepage.graph.profiles import load_profile
from ds_finepage.reporting.curve import Curve, CurvePoint, at_least_as_good, price_table
from ds_finepage.reporting.figures import NS_PER_S

if TYPE_CHECKING:
    from ds_finepage.modeller import Modeller


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    options.add_model(parser)
    options.add_weights(parser, many=True)
    options.add_ranks(parser)
    parser.add_argument("--points", type=int, default=8, help="budgets to plan (8)")
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
    profile = load_profile(arguments.hardware)
    options.note_link(arguments.ranks, profile)
    host_memory_bytes = options.host_memory_of(arguments.host_memory)

    from ds_finepage.modeller import Modeller  # imports torch, so wrong options are refused first

    planners = [
        Planner(
            arguments.policy,
            Modeller(
                arguments.model,
                batch=arguments.batch,
                prompt_tokens=arguments.seq,
                hardware=profile,
                split=not arguments.no_split,
                host_memory_bytes=host_memory_bytes,
                weights=form,
                weights_group=arguments.weights_group,
                num_ranks=arguments.ranks,
            ),
        )
        for form in forms
    ]
    curves = make_curves(planners, arguments.points)
    if arguments.json:
        found = [asdict(curve) for curve in curves]
        print(json.dumps(found if len(found) > 1 else found[0], indent=2))
        return 0
    output.show(price_table(curves) if len(curves) > 1 else curves[0].to_table())
    for curve in curves:
        if is_modelled_packing(arguments.policy, curve.weights):
            print(packing_note(str(curve.weights)))
    return 0


def make_curves(planners: Sequence[Planner], num_points: int) -> list[Curve]:
    """Plan each form of a model's weights under the same budgets, as far as it can run.

    Args:
        planners: One for each form.
        num_points: Budgets to plan.
    """
    budgets = common_budgets([planner.ends for planner in planners], num_points)
    asked = [(planner, b) for planner in planners for b in budgets if b >= planner.ends[0]]
    points: dict[Planner, list[CurvePoint]] = {}
    for planner, budget in output.with_progress(asked):
        points.setdefault(planner, []).append(planner.point(budget))
    return [planner.curve(found) for planner, found in points.items()]


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

    def curve(self, planned: Sequence[CurvePoint]) -> Curve:
        """Return the curve through points."""
        decode, profile = self._modeller.decode, self._modeller.profile
        return Curve(
            model=decode.model,
            batch=decode.batch,
            seq=decode.seq,
            policy=self._policy,
            hardware=profile.name,
            weight_bytes=decode.graph.weight_bytes,
            capacity_bytes=profile.capacity_bytes,
            points=at_least_as_good(planned),
            weights=self._modeller.weights,
            num_ranks=decode.num_ranks,
        )


def common_budgets(ends: Sequence[tuple[int, int]], num_points: int) -> list[int]:
    """Return budgets for all forms: evenly spread over what each one can use."""
    steps = max(1, -(-num_points // len(ends)) - 1)
    spread = ((least, most - least, i) for least, most in ends for i in range(steps + 1))
    return sorted({least + extent * i // steps for least, extent, i in spread})
