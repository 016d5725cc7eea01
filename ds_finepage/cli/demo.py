"""Show both engines side by side on a small model.

This is 'compare' on a Llama with random weights from a fixed seed, 163 MB of them in bfloat16;
nothing is downloaded. It runs plain transformers, for tokens to compare with; stock ZeRO-Inference,
which has no budget; and ds_finepage under one. The demo uses the accelerator if there is one. With
--weights int4 all three run the same packed model. With --ranks 2 both engines run on two ranks of
this machine, each with its own shard of the model (tensor parallelism).

Exit status: 0; 1 if tokens differ, the budget was exceeded or an engine did not run; 2 for an
option that cannot be used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ds_finepage.cli import compare
from ds_finepage.cli.options import add_weights
from ds_finepage.cli.output import add_json
from ds_finepage.compare.arms import OURS, PLAIN

MODEL = Path(__file__).with_suffix(".json")
"""As in real models, a weight of it is small beside what has no room."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ds-finepage demo``."""
    add_json(parser)
    parser.add_argument(
        "--budget",
        "--device-budget",
        dest="device_budget",
        default="40%weights",
        help="ds_finepage's device budget, as in finepage.device_budget (default: %(default)s)",
    )
    add_weights(parser)
    compare.add_ranks(parser)
    parser.add_argument(
        "--new-tokens",
        "--new",
        dest="new",
        type=int,
        default=32,
        metavar="N",
        help="tokens to generate (default: %(default)s)",
    )
    parser.add_argument(
        "--keep",
        "--out",
        dest="out",
        type=Path,
        metavar="DIR",
        help="keep checkpoint, figures, plans and logs there",
    )
    parser.add_argument("--model", default=str(MODEL), help=argparse.SUPPRESS)
    parser.set_defaults(layers=None, ds_config=None, hardware=None, resume=False)
    parser.set_defaults(batch="1", prompt=16, repeats=1, arms=f"{PLAIN},zero,{OURS}", is_demo=True)


def run(arguments: argparse.Namespace) -> int:
    """Run ``ds-finepage demo``."""
    return compare.run(arguments)
