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
from typing import TYPE_CHECKING, Any

from ds_finepage.capture.shipped import require_model
from ds_finepage.cli import options, output
from ds_finepage.cli.grid_rows import (
    BASELINE,
    Cell,
    Point,
    Results,
    lines_below,
    to_rows,
    to_table,
)
from ds_finepage.cli.output import with_progress
from ds_finepage.config import DeviceBudget
from ds_finepage.errors import CaptureError, ConfigError, PlanInfeasibleError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.packed import GROUP
from ds_finepage.graph.profiles import load_profile
from ds_finepage.reporting.results import installed_versions

if TYPE_CHECKING:
    from ds_finepage.modeller import Modeller

DEFAULT_POLICIES = (BASELINE, "zero-persistence", "static", "horizon", "finepage")


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
    options.add_weights(parser, many=True)
    options.add_ranks(parser)
    options.add_budget(parser, "auto")
    options.add_host_memory(parser)
    options.add_split(parser)
    output.add_json(parser)


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
    planner = Planner(
        profiles=profiles,
        budget=budget,
        split=not arguments.no_split,
        host_memory_bytes=options.host_memory_of(arguments.host_memory),
        weights_group=arguments.weights_group,
    )
    results = {cell: planner.plan(cell) for cell in with_progress(cells)}
    if arguments.json:
        print(json.dumps(to_document(results, arguments.typed), indent=2))
    else:
        output.show(to_table(results))
        for line in lines_below(results):
            print(line)
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
        self._made: dict[Any, Modeller] = {}

    def plan(self, cell: Cell) -> Point | str:
        """Plan both passes of a cell; a KV cache that the prefill moves to host memory stays."""
        phase = "prefill"
        try:
            profile = self._profiles[cell.hardware]
            modeller = self._modeller(cell, profile).at(str(self._budget), profile)
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
                split=self._split,
                host_memory_bytes=self._host_memory_bytes,
                weights=cell.weights,
                weights_group=self._weights_group,
                num_ranks=cell.num_ranks,
            )
        return self._made[key]


def to_document(results: Results, command: str) -> dict[str, Any]:
    """Return the cells, with the date, the command and the versions."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": command,
        "versions": installed_versions(("ds_finepage", "torch", "transformers")),
        "cells": to_rows(results),
    }
