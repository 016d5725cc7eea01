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
import json
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

from rich.table import Table

from ds_finepage.cli import compare, output
from ds_finepage.cli.options import RUNS, add_ranks, add_weights
from ds_finepage.compare.arms import OURS, PLAIN
from ds_finepage.config import SECTION
from ds_finepage.reporting.results import Results, Run
from ds_finepage.reporting.tables import bytes_or_dash
from ds_finepage.reporting.tabular import table_of
from ds_finepage.units import format_ns

MODEL = Path(__file__).with_suffix(".json")
"""As in real models, a weight of it is small beside what has no room."""

STOCK = "zero"
NOTES = """\
Peak: all device bytes from just before the engine takes the model on, without the host copy of the
weights. Stock has no budget. A step: the last counted decode step. The first call traces, measures
and plans the model, with the meter on."""

NOTES_CPU = """\
On the CPU a fetch of stock ZeRO-Inference copies nothing (the meter makes it copy), while
ds_finepage really copies: compare the bytes here, and times on a GPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ds-finepage demo``."""
    output.add_json(parser)
    parser.add_argument(
        "--budget",
        "--device-budget",
        dest="device_budget",
        default="40%weights",
        help="ds_finepage's device budget, as in finepage.device_budget (default: %(default)s)",
    )
    add_weights(parser)
    add_ranks(parser, RUNS)
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
    parser.set_defaults(batch="1", prompt=16, repeats=1, arms=f"{PLAIN},{STOCK},{OURS}")
    parser.set_defaults(is_demo=True)


def run(arguments: argparse.Namespace) -> int:
    """Run ``ds-finepage demo``."""
    return compare.run(arguments, show)


def show(results: Results) -> None:
    """Print the figures of both engines, and what has to be known about them."""
    output.show(to_table(results))
    print(NOTES)
    if compare.device_type() == "cpu":
        print(NOTES_CPU)


def to_table(results: Results) -> Table:
    """Return the table, with a line for each figure of each rank."""
    assert results.settings is not None
    new_tokens = results.settings.new_tokens
    runs = [run for run in results.runs if run.arm in (STOCK, OURS) and run.reason is None]
    num_ranks = max([1, *(len(run.ranks) for run in runs)])

    def later_call(run: Run) -> str:
        return format_ns((run.prefill.wall_ns or 0) + (new_tokens - 1) * (run.decode.wall_ns or 0))

    lines: tuple[tuple[str, Callable[[Run], str], Callable[[Run], str] | None], ...] = (
        ("tokens equal to plain transformers", lambda r: "yes" if r.tokens_equal else "no", None),
        (
            "peak device memory",
            lambda r: bytes_or_dash(r.peak_bytes),
            lambda r: f"<= {bytes_or_dash(r.budget_bytes)} (budget)",
        ),
        (
            "copied in a prefill",
            lambda r: bytes_or_dash(r.prefill.h2d_bytes),
            lambda r: f">= {bytes_or_dash(r.prefill.lower_bound_bytes)}",
        ),
        (
            "copied in a decode step",
            lambda r: bytes_or_dash(r.decode.h2d_bytes),
            lambda r: f">= {bytes_or_dash(r.decode.lower_bound_bytes)}",
        ),
        ("first call", lambda r: format_ns(r.first_call_ns or 0), None),
        (f"a later call of {new_tokens} tokens", later_call, None),
    )
    rows = []
    for label, cell, bound in lines:
        for rank in range(num_ranks):
            found = [run.ranks[rank] if num_ranks > 1 else run for run in runs]
            at = label if num_ranks == 1 else f"{label}, rank {rank}"
            rows.append((at, *map(cell, found), bound(found[-1]) if bound and found else ""))
    titles = {STOCK: "stock ZeRO-Inference", OURS: "ds_finepage"}
    headings = ("engine", *(titles[run.arm] for run in runs), "bound")
    columns = [(heading, itemgetter(number)) for number, heading in enumerate(headings)]
    form = json.loads(results.settings.ds_config).get(SECTION, {}).get("weights")
    packed = "" if form is None else f" in {form}"
    title = f"Llama, {bytes_or_dash(runs[-1].weight_bytes if runs else None)} of weights{packed}"
    return table_of(title, columns, rows, ("engine",))
