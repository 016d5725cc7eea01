"""Tell which (model, batch, sequence) run on which card, and how fast, policy by policy.

A cell runs if both a prefill of the sequence and the decode step after it can be planned under the
budget. If the KV cache does not fit the device, it is in host memory, as in a run; policies that
stand for other systems keep it on the device.

Exit status: 0, whether cells run or not; 2 for an option that cannot be used.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

from rich.table import Table

from ds_finepage.capture.shipped import config_text
from ds_finepage.cli import options, output
from ds_finepage.cli.output import with_progress
from ds_finepage.config import DeviceBudget
from ds_finepage.errors import CaptureError, ConfigError, PlanInfeasibleError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.packed import UNPACKED
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.baselines.zero_search import POLICY as SEARCHED
from ds_finepage.planning.policies import POLICIES, policy_named
from ds_finepage.reporting.figures import of_ranks
from ds_finepage.reporting.results import installed_versions
from ds_finepage.units import format_ns

if TYPE_CHECKING:
    from ds_finepage.modeller import Modeller
    from ds_finepage.whatif import PlannedModel

BASELINE = "zero"
ON_HOST = "h"
"""Marks a cell whose KV cache is in host memory."""

OURS = "finepage"

DEFAULT_POLICIES = (BASELINE, "zero-persistence", "static", "horizon", "finepage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination of model, machine, shape, policy and form of the weights.

    ``weights`` is "bf16", "int8" or "int4"; None leaves them as the model has them. All cells of a
    grid have the same ``num_ranks``.
    """

    model: str
    hardware: str
    batch: int
    seq: int
    policy: str
    weights: str | None = None
    num_ranks: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Speed and bytes under one budget: of a steady decode step, and of the prefill before it."""

    budget_bytes: int
    weight_bytes: int
    tokens_per_s: float
    decode_ns: int
    decode_bound_ns: int
    decode_reloaded_bytes: int
    first_token_ns: int
    first_token_bound_ns: int
    prefill_reloaded_bytes: int
    prefill_kv_on_host: bool
    decode_kv_on_host: bool
    kv_copied_bytes: int  # by a decode step, in both directions
    prefill_settings: dict[str, int] | None  # of DeepSpeed, if the policy is its
    decode_settings: dict[str, int] | None

    @classmethod
    def of(cls, first: PlannedModel, step: PlannedModel) -> Point:
        """Return the figures of a planned prefill and decode step."""
        prefill, decode = first.figures, step.figures
        return cls(
            budget_bytes=decode.budget_bytes,
            weight_bytes=decode.weight_bytes,
            tokens_per_s=decode.tokens_per_s,
            decode_ns=decode.predicted_ns,
            decode_bound_ns=decode.lower_bound_ns,
            decode_reloaded_bytes=decode.reloaded_bytes,
            first_token_ns=prefill.predicted_ns,
            first_token_bound_ns=prefill.lower_bound_ns,
            prefill_reloaded_bytes=prefill.reloaded_bytes,
            prefill_kv_on_host=prefill.kv_on_host,
            decode_kv_on_host=decode.kv_on_host,
            kv_copied_bytes=decode.kv_copied_bytes,
            prefill_settings=first.engine.keys if first.engine else None,
            decode_settings=step.engine.keys if step.engine else None,
        )


Results = dict[Cell, Point | str]
"""The figures of each cell; if it does not run, why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    lists = (
        ("--models", None, "models: shipped names, folders or config.json files"),
        ("--hardware", None, "hardware profiles, by name or path"),
        ("--batch", "1", "batch sizes"),
        ("--seq", "2048", "tokens of a sequence"),
        ("--policies", ",".join(DEFAULT_POLICIES), "policies"),
    )
    for name, default, text in lists:
        parser.add_argument(
            name,
            required=default is None,
            default=default,
            metavar="LIST",
            help=f"{text}, with commas in between" + (f" ({default})" if default else ""),
        )
    options.add_host(parser)
    options.add_weights(parser, many=True)
    options.add_ranks(parser)
    options.add_budget(parser)
    options.add_host_memory(parser)
    options.add_split(parser)
    output.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan all cells that are not finished yet, print them, write them."""
    options.require_counts(arguments, "ranks")
    models = options.names_of(arguments.models, "--models")
    for model in models:
        config_text(model)  # refuses one that is not there
    policies = options.names_of(arguments.policies, "--policies")
    for policy in policies:
        policy_named(policy)  # refuses one that is not there
    forms = options.weights_of(arguments)
    budget = DeviceBudget.parse(arguments.device_budget, name="--device-budget")
    hardware = options.names_of(arguments.hardware, "--hardware")
    if arguments.host is not None:
        hardware = [f"{name}+{arguments.host}" for name in hardware]
    for name in hardware:
        options.note_link(arguments.ranks, load_profile(name))
    cells = [
        Cell(
            model=model,
            hardware=card,
            batch=batch,
            seq=seq,
            policy=policy,
            weights=weights,
            num_ranks=arguments.ranks,
        )
        for model, batch, seq, weights, card, policy in itertools.product(
            models,
            options.counts_of(arguments.batch, "--batch"),
            options.counts_of(arguments.seq, "--seq"),
            forms,
            hardware,
            policies,
        )
    ]
    planner = Planner(budget=budget, settings=options.settings_of(arguments))
    results = {cell: planner.plan(cell) for cell in with_progress(cells)}
    if arguments.json:
        document = {
            "date": datetime.date.today().isoformat(),
            "command": arguments.typed,
            "versions": installed_versions(),
            "cells": to_rows(results),
        }
        print(json.dumps(document, indent=2))
    else:
        output.show(to_table(results))
        for line in lines_below(results):
            print(line)
    return 0


@dataclass(kw_only=True)
class Planner:
    """Plans cells; captures each pass once for all cards and policies.

    Attributes:
        budget: The limit on all device bytes.
        settings: Further settings of each :class:`Modeller`.
    """

    budget: DeviceBudget
    settings: dict[str, Any]
    _made: dict[Any, Modeller] = field(default_factory=dict, init=False)

    def plan(self, cell: Cell) -> Point | str:
        """Plan both passes of a cell; a KV cache that the prefill moves to host memory stays."""
        phase = "prefill"
        try:
            profile = load_profile(cell.hardware)
            modeller = self._modeller(cell, profile).at(str(self.budget), profile)
            first = modeller.first(cell.policy)
            phase = "decode"
            return Point.of(first, modeller.step(cell.policy))
        except (ConfigError, CaptureError, PlanInfeasibleError) as error:
            return f"{phase}: {error}"

    def _modeller(self, cell: Cell, profile: HardwareProfile) -> Modeller:
        """Capture both passes of a cell; cells of one shape are adjacent, and captured once."""
        from ds_finepage.capture.models import default_dtype, load_model_config
        from ds_finepage.modeller import Modeller

        dtype = default_dtype(load_model_config(cell.model), profile)
        key = (cell.model, cell.batch, cell.seq, cell.weights, dtype)
        if key not in self._made:
            self._made.clear()
            self._made[key] = Modeller(
                cell.model,
                batch=cell.batch,
                prompt_tokens=cell.seq,
                hardware=profile,
                weights=cell.weights,
                **self.settings,
            )
        return self._made[key]


# Rows.


Row = tuple[str, str, int, int, str | None]
"""Model, hardware, batch, sequence and form of the weights: a row of the table."""


def row_of(cell: Cell) -> Row:
    """Return the row of a cell."""
    return cell.model, cell.hardware, cell.batch, cell.seq, cell.weights


def by_row(results: Results) -> dict[Row, dict[str, Point | str]]:
    """Return the results by row, then by policy."""
    rows: dict[Row, dict[str, Point | str]] = {}
    for cell, result in results.items():
        rows.setdefault(row_of(cell), {})[cell.policy] = result
    return rows


def contest(by_policy: Mapping[str, Point | str], phase: str) -> dict[str, Any] | None:
    """Compare the policies of one row in one phase; None if none of them runs.

    Returns:
        The fastest policy, the first of those that are equal; the fastest one that stands for
        another system; and the time of that one over the time of finepage.
    """
    known = {
        policy: point.decode_ns if phase == "decode" else point.first_token_ns
        for policy, point in by_policy.items()
        if isinstance(point, Point)
    }
    if not known:
        return None
    baselines = [policy for policy in known if not POLICIES[policy].pages]
    best = min(baselines, key=known.__getitem__, default=None)
    ours = known.get(OURS)
    return {
        "winner": min(known, key=known.__getitem__),
        "best_baseline": best,
        "over_baselines": known[best] / ours if best and ours else None,
    }


def to_rows(results: Results) -> list[dict[str, Any]]:
    """Return the cells for JSON, each with the outcome of its row."""
    outcomes = {
        row: {phase: contest(by_policy, phase) for phase in ("prefill", "decode")}
        for row, by_policy in by_row(results).items()
    }
    nothing = dict.fromkeys(field.name for field in fields(Point))
    return [
        {
            **asdict(cell),
            "runs": isinstance(result, Point),
            "reason": result if isinstance(result, str) else None,
            **(asdict(result) if isinstance(result, Point) else nothing),
            "row": outcomes[row_of(cell)],
        }
        for cell, result in results.items()
    ]


def reasons(results: Results) -> list[str]:
    """List the reasons why cells do not run, each once."""
    return list(dict.fromkeys(reason for reason in results.values() if isinstance(reason, str)))


def lines_below(results: Results) -> list[str]:
    """List the reasons, and the settings of DeepSpeed that were found, for below the table."""
    found = [f"({number}) {reason}" for number, reason in enumerate(reasons(results), start=1)]
    packed = [c.weights for c in results if is_modelled_packing(c.policy, c.weights)]
    found += [packing_note(str(form)) for form in dict.fromkeys(packed)]
    for cell, result in results.items():
        if cell.policy != SEARCHED or isinstance(result, str):
            continue
        where = f"{cell.model}, {cell.hardware}, batch {cell.batch}, sequence {cell.seq}"
        where += f", {cell.weights}" if cell.weights else ""
        for phase, settings in (
            ("prefill", result.prefill_settings),
            ("decode", result.decode_settings),
        ):
            text = json.dumps(settings)
            found.append(f"zero_optimization of {SEARCHED}, {where}, {phase}: {text}")
    return found


def is_modelled_packing(policy: str, weights: str | None) -> bool:
    """Tell whether a policy stands for DeepSpeed's own packing of weights."""
    return weights not in (None, UNPACKED) and POLICIES[policy].is_zero


def packing_note(weights: str) -> str:
    """Say what the packed weights of stock stand for.

    Args:
        weights: The form.
    """
    return (
        f"zero*, {weights}: modelled after DeepSpeed's weight_quantization, which keeps a layer in "
        "one packed parameter. The whole weights that it unpacks are not counted."
    )


def to_table(results: Results) -> Table:
    """Return the cells as a table: a row for each combination, a column for each policy."""
    policies = list(dict.fromkeys(cell.policy for cell in results))
    has_baseline = BASELINE in policies
    moved = any(isinstance(r, Point) and r.decode_kv_on_host for r in results.values())
    table = Table(
        title="predicted tokens a second"
        + (f" (and times {BASELINE})" if has_baseline else "")
        + ", time to the first token"
        + (f" ({ON_HOST}: the KV cache is in host memory)" if moved else "")
        + of_ranks(max((cell.num_ranks for cell in results), default=1)),
        title_justify="left",
    )
    has_forms = any(cell.weights for cell in results)
    for heading in ("model", "hardware", "batch", "sequence", *(["weights"] if has_forms else [])):
        table.add_column(heading)
    for policy in policies:
        table.add_column(policy, justify="right")
    for heading in ("fastest step", "fastest first token"):
        table.add_column(heading)
    numbers = {reason: number for number, reason in enumerate(reasons(results), start=1)}
    for (*shape, weights), by_policy in by_row(results).items():
        baseline = by_policy.get(BASELINE)
        row = [by_policy[policy] for policy in policies]
        texts = [f"no ({numbers[r]})" if isinstance(r, str) else _text(r, baseline) for r in row]
        outcomes = [_outcome(contest(by_policy, phase)) for phase in ("decode", "prefill")]
        forms = [str(weights)] if has_forms else []
        table.add_row(*map(str, shape), *forms, *texts, *outcomes)
    return table


def _outcome(found: dict[str, Any] | None) -> str:
    """Name the winner, and say how fast finepage is beside the best baseline."""
    if found is None:
        return ""
    winner, best, ratio = found.values()
    return str(winner) if ratio is None else f"{winner}; {OURS} {ratio:.2f} x {best}"


def _text(point: Point, baseline: Point | str | None) -> str:
    ratio = ""
    if isinstance(baseline, Point) and baseline is not point and baseline.tokens_per_s:
        ratio = f" ({point.tokens_per_s / baseline.tokens_per_s:.2f} x)"
    place = f" {ON_HOST}" if point.decode_kv_on_host else ""
    return f"{point.tokens_per_s:.2f}{ratio}, {format_ns(point.first_token_ns)}{place}"
