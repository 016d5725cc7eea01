"""Plan one pass of a model for a machine: bytes copied, time taken, and the bounds of both.

This needs neither the model's weights nor the machine. It captures the pass from the model's
config, plans it under the budget, checks the plan, and predicts its time with the rates of the
hardware profile. If the KV cache does not fit the device, it is in host memory, as in a run.
--kv-cache host has it there always, as finepage.kv_cache does, which may be faster.

--batch auto finds the batch that makes most tokens a second over a whole generation: a prompt of
--seq tokens less --new, and --new tokens behind it.

Exit status: 0; 2 if no plan exists under the budget, or for an option that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from ds_finepage.capture.shipped import config_text
from ds_finepage.cli import auto_batch, drafts, options, output
from ds_finepage.cli.auto_batch import NEW_TOKENS
from ds_finepage.cli.grid import is_modelled_packing, packing_note
from ds_finepage.config import DeviceBudget, KVPlace
from ds_finepage.graph import codec
from ds_finepage.graph.packed import UNPACKED
from ds_finepage.planning.policies import policy_named
from ds_finepage.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    options.add_model(parser, finds_batch=True)
    parser.add_argument(
        "--phase",
        choices=options.PHASES,
        default="decode",
        help="prefill: all tokens at once; decode: one token (decode)",
    )
    text = f"with --batch auto: those of the --seq tokens that are generated ({NEW_TOKENS})"
    parser.add_argument("--new", type=int, metavar="N", help=text)
    options.add_weights(parser)
    options.add_ranks(parser)
    options.add_budget(parser)
    options.add_host_memory(parser)
    drafts.add_draft(parser)
    parser.add_argument(
        "--kv-cache",
        choices=get_args(KVPlace),
        default="auto",
        help="as finepage.kv_cache: where the KV cache is (auto: in host memory too if it competes "
        "with the weights)",
    )
    output.add_json(parser)
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the plan as JSON, for 'check' and 'trace'; with --batch auto: the speed of "
        "each batch, as a PNG",
    )
    options.add_force(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan, print the figures, write the plan."""
    config_text(arguments.model)  # refuses one that is not there
    is_auto = auto_batch.is_asked(arguments)
    options.require_counts(arguments, "seq", "ranks")
    policy_named(arguments.policy)  # refuses one that is not there
    weights = options.one_form_of(arguments)
    drafts.acceptances_of(arguments)
    budget = DeviceBudget.parse(arguments.device_budget, name="--device-budget")
    settings = options.settings_of(arguments)
    profile = options.machine_of(arguments)
    options.note_link(arguments.ranks, profile)
    if arguments.out is not None:
        options.require_writable(arguments.out, force=arguments.force)

    settings |= {
        "device_budget": str(budget),
        "hardware": arguments.hardware,
        "weights": weights,
    }
    if is_auto:
        return auto_batch.run(arguments, **settings)

    from ds_finepage.api import plan_model  # imports torch, so wrong options are refused first

    given = {name: getattr(arguments, name) for name in ("phase", "batch", "seq", "policy")}
    planned = plan_model(arguments.model, **given, **settings, kv_cache=arguments.kv_cache)
    if planned.figures.budget_bytes > profile.capacity_bytes:
        options.note(
            f"{arguments.device_budget} is more than the {format_bytes(profile.capacity_bytes)} of "
            f"{profile.name}; this is what a card of its speed with more memory would do"
        )
    if arguments.out is not None:
        codec.save(planned.memgraph, arguments.out)
    points = drafts.points_of(arguments, [planned.figures.budget_bytes])
    if arguments.json:
        print(json.dumps(asdict(planned.figures) | drafts.as_json(arguments, points), indent=2))
        return 0
    output.show_figures(planned.figures.title, planned.figures.lines())
    drafts.show(arguments, points)
    if is_modelled_packing(arguments.policy, weights):
        print(packing_note(str(weights)))
    if arguments.out is not None:
        print(f"plan: {arguments.out}; ds-finepage check {shlex.quote(str(arguments.out))}")
    following = options.command_line(
        "curve",
        model=arguments.model,
        batch=arguments.batch,
        seq=arguments.seq,
        hardware=arguments.hardware,
        ranks=None if arguments.ranks == 1 else arguments.ranks,
        weights=arguments.weights,
        weights_group=None if weights in (None, UNPACKED) else arguments.weights_group,
    )
    print(f"figures of other budgets: {following}")
    return 0
