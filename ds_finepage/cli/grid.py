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
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ds_finepage
from ds_finepage.capture.shipped import require_model
from ds_finepage.cli import options, output
from ds_finepage.cli.grid_rows import (
    BASELINE,
    Cell,
    Result,
    Results,
    lines_below,
    to_rows,
    to_table,
)
from ds_finepage.cli.output import with_progress
from ds_finepage.config import DeviceBudget
from ds_finepage.errors import CaptureError, ConfigError, PlanInfeasibleError
from ds_finepage.files import write_file
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.packed import GROUP
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.budget import budget_on
from ds_finepage.planning.policies import POLICIES

if TYPE_CHECKING:
    from ds_finepage.reporting.figures import PlanFigures
    from ds_finepage.whatif import CapturedModel

DEFAULT_POLICIES = (BASELINE, "zero-persistence", "static", "horizon", "finepage")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    lists = (
        ("--models", None, "models: shipped names, folders or config.json files"),
        ("--hardware", None, "hardware profiles, by name or path"),
        ("--batch", "1", "batch sizes"),
        ("--seq", "2048", "tokens of a sequence"),
        ("--policies", ",".join(default_policies()), "policies"),
    )
    for name, default, text in lists:
        parser.add_argument(
            name,
            required=default is None,
            default=default,
            metavar="LIST",
            help=f"{text}, with commas in between" + (f" ({default})" if default else ""),
        )
    options.add_weights(parser, many=True)
    options.add_ranks(parser)
    options.add_budget(parser, "auto")
    options.add_host_memory(parser)
    options.add_split(parser)
    output.add_json(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the cells as JSON, with date, command and versions; in a folder the file is "
        "called grid_DATE.json",
    )
    options.add_force(parser)


def default_policies() -> list[str]:
    """Return the policies that are compared by default."""
    return [name for name in DEFAULT_POLICIES if name in POLICIES]


def run(arguments: argparse.Namespace) -> int:
    """Plan all cells that are not finished yet, print them, write them."""
    options.require_counts(arguments, "ranks")
    models = models_of(arguments)
    policies = options.names_of(arguments.policies, "--policies")
    options.require_policies(policies)
    forms = options.weights_of(arguments)
    budget = DeviceBudget.parse(arguments.device_budget, name="--device-budget")
    hardware = options.names_of(arguments.hardware, "--hardware")
    profiles = {name: load_profile(name) for name in hardware}
    for profile in profiles.values():
        options.note_link(arguments.ranks, profile)
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
    out = out_file(arguments.out, force=arguments.force)

    planner = Planner(
        profiles=profiles,
        budget=budget,
        split=not arguments.no_split,
        host_memory_bytes=options.host_memory_of(arguments.host_memory),
        weights_group=arguments.weights_group,
    )
    results = {cell: planner.plan(cell) for cell in with_progress(cells)}
    if out is not None:
        document = to_document(results, arguments.typed)
        write_file(out, json.dumps(document, indent=2) + "\n")
    if arguments.json:
        print(json.dumps(to_rows(results), indent=2))
    else:
        output.show(to_table(results))
        for line in lines_below(results):
            print(line)
        if out is not None:
            print(f"cells: {out}")
    return 0


def models_of(arguments: argparse.Namespace) -> list[str]:
    """Read the names of the models.

    Raises:
        ConfigError: There is none, or one is not there.
    """
    models = options.names_of(arguments.models, "--models")
    for model in models:
        require_model(model)
    return models


def out_file(path: Path | None, *, force: bool) -> Path | None:
    """Return the file to write; in a folder its name has the date."""
    if path is None:
        return None
    if path.is_dir():
        path = path / f"grid_{datetime.date.today().isoformat()}.json"
    options.require_writable(path, force=force)
    return path


class Planner:
    """Plans cells; captures each pass once for all cards and policies."""

    def __init__(
        self,
        *,
        profiles: dict[str, HardwareProfile],
        budget: DeviceBudget,
        split: bool,
        host_memory_bytes: int | None = None,
        weights_group: int = GROUP,
    ) -> None:
        """Store the settings that all cells share.

        Args:
            profiles: The machines, by name.
            budget: The limit on all device bytes.
            split: Policies may cut weights, if they can.
            host_memory_bytes: Host memory of each machine; None if that is not known.
            weights_group: Weights that share a scale where they are packed.
        """
        self._profiles = profiles
        self._budget = budget
        self._split = split
        self._host_memory_bytes = host_memory_bytes
        self._weights_group = weights_group
        self._captured: dict[Any, CapturedModel | Exception] = {}

    def plan(self, cell: Cell) -> Result:
        """Plan both passes of a cell; a KV cache that the prefill moves to host memory stays."""
        from ds_finepage.whatif import plan_captured

        profile = self._profiles[cell.hardware]
        figures: dict[str, PlanFigures] = {}
        settings: dict[str, dict[str, int] | None] = {}
        budget_bytes = None
        for phase in options.PHASES:
            try:
                captured = self._capture(cell, phase)
                if "prefill" in figures and figures["prefill"].kv_on_host:
                    captured = captured.on_host or captured
                weight_bytes = captured.graph.weight_bytes
                budget_bytes = budget_on(self._budget, weight_bytes, profile)
                planned = plan_captured(
                    captured,
                    budget_bytes=budget_bytes,
                    profile=profile,
                    policy=cell.policy,
                    split=self._split,
                    host_memory_bytes=self._host_memory_bytes,
                    as_in_a_run=True,
                )
                figures[phase] = planned.figures
                settings[phase] = None if planned.engine is None else planned.engine.keys
            except (ConfigError, CaptureError, PlanInfeasibleError) as error:
                return Result(runs=False, reason=f"{phase}: {error}", budget_bytes=budget_bytes)
        prefill, decode = figures["prefill"], figures["decode"]
        return Result(
            runs=True,
            budget_bytes=budget_bytes,
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
            prefill_settings=settings["prefill"],
            decode_settings=settings["decode"],
        )

    def _capture(self, cell: Cell, phase: str) -> CapturedModel:
        from ds_finepage.capture.models import default_dtype, load_model_config
        from ds_finepage.whatif import capture_model

        profile = self._profiles[cell.hardware]
        dtype = default_dtype(load_model_config(cell.model), profile)
        shape = (cell.model, cell.batch, cell.seq)
        if any(key[:3] != shape for key in self._captured):
            self._captured.clear()  # cells of one shape are adjacent
        key = (*shape, phase, dtype, cell.weights)
        if key not in self._captured:
            try:
                self._captured[key] = capture_model(
                    cell.model,
                    phase=phase,
                    batch=cell.batch,
                    seq=cell.seq,
                    profile=profile,
                    weights=cell.weights,
                    weights_group=self._weights_group,
                    num_ranks=cell.num_ranks,
                )
            except (ConfigError, CaptureError) as error:
                self._captured[key] = error
        captured = self._captured[key]
        if isinstance(captured, Exception):
            raise captured
        return captured


def to_document(results: Results, command: str) -> dict[str, Any]:
    """Return the contents of a result file: the cells, the command and the versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "versions": {
            "ds_finepage": ds_finepage.__version__,
            **{name: version(name) for name in ("torch", "transformers")},
        },
        "cells": to_rows(results),
    }
