"""Show both engines side by side on a small model.

Makes a Llama checkpoint with a tokenizer (random weights from a fixed seed, nothing is downloaded)
and compares on it, as 'compare' does: plain transformers, for tokens to compare with; stock
ZeRO-Inference; and ds_finepage under a budget. The demo uses the accelerator if there is one.
With --weights int4 all three run the same packed model. With --ranks 2 both engines run on two
ranks of this machine, each with its own shard of the model (tensor parallelism).

Exit status: 0; 1 if tokens differ or the budget was exceeded; 2 for an option that cannot be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

from rich.table import Table

import ds_finepage
from ds_finepage.cli import compare
from ds_finepage.cli.options import PROGRAM, add_weights
from ds_finepage.cli.output import add_json, show
from ds_finepage.compare.arms import ARMS, OURS, PLAIN
from ds_finepage.compare.checkpoint import LlamaShape, config_of
from ds_finepage.compare.judge import problems_of
from ds_finepage.compare.processes import last_line, run_process
from ds_finepage.config import SECTION
from ds_finepage.errors import ConfigError, FinepageError
from ds_finepage.reporting.results import CompareSettings, Results, Run
from ds_finepage.reporting.tabular import table_of
from ds_finepage.units import format_bytes, format_ns

PROMPT = "The planner never sees torch; the executor never decides."
ENGINES = {"zero": "zero_inference", OURS: "finepage"}
"""The arms of the table, by the names of their ds_configs."""

TINY = LlamaShape(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    vocab_size=1024,
)
"""For tests of this command: the same steps in little time."""

NOTES = """\
Peak: a meter reads the allocator from just before deepspeed.initialize on. It counts all device
bytes, but not the host copy of the weights. Reloads: of the last prefill and the last decode step
with the meter. Stock has no budget; its peak follows from its default prefetch settings. Times are
of generate alone. The first call has the meter on, and captures, measures and plans the model."""

NOTES_RANKS = """\
DeepSpeed's AutoTP cuts the model for both engines. Budget and bytes are those of one rank. Ranks
compute in float32: their sums round differently than those of one process."""

NOTES_CPU_RANKS = """\
On the CPU the meter of several ranks begins after deepspeed.initialize, which makes the partitions
in host memory."""

NOTES_CPU = """\
On the CPU a fetch of stock ZeRO-Inference copies nothing (the meter makes it copy), while
ds_finepage really copies: compare the bytes here, and times on a GPU."""


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
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="start N ranks, each with its shard of the model; the budget is that of one rank "
        "(default: %(default)s)",
    )
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
        "--keep", type=Path, metavar="DIR", help="keep checkpoint, ds_configs and logs there"
    )
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    arms = ",".join((PLAIN, *ENGINES))
    parser.set_defaults(layers=None, ds_config=None, hardware=None)
    parser.set_defaults(batch="1", prompt=16, repeats=1, arms=arms)


def run(arguments: argparse.Namespace) -> int:
    """Run ``ds-finepage demo``."""
    shape = TINY if arguments.tiny else LlamaShape()
    if arguments.ranks > 1:
        shape = dataclasses.replace(shape, dtype="float32")
    require_empty(arguments.keep)
    with tempfile.TemporaryDirectory() as arguments.model:  # refuse before any work
        config_of(shape).save_pretrained(arguments.model)
        settings = compare.settings_of(arguments)
    with compare.work_folder(arguments.keep) as folder:
        settings = dataclasses.replace(settings, model=str(folder / "model"))
        for arm, name in ENGINES.items():
            write_config(folder / f"{name}.json", settings, is_enabled=arm == OURS)
        make_model(folder, shape)
        results = compare.compare(
            settings, folder, compare.new_results(settings, arguments.typed), limits_stock=False
        )
    require_all(results)
    if arguments.json:
        print(json.dumps(dataclasses.asdict(results), indent=1))
    else:
        show(to_table(results))
        print(notes_below(results))
    problems = problems_of(results)
    for problem in problems:
        print(f"{PROGRAM}: {problem}", file=sys.stderr)
    if arguments.keep is not None and not arguments.json:
        print(f"\nBy hand:\n\n    {by_hand(arguments.keep, arguments.ranks)}")
    return 1 if problems else 0


# Before the runs.


def require_empty(keep: Path | None) -> None:
    """Refuse a folder to keep that is a file, or not empty.

    Raises:
        ConfigError: It is.
    """
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ConfigError(f"--keep: {keep} exists and is not an empty folder. Name a new one.")


def write_config(path: Path, settings: CompareSettings, *, is_enabled: bool) -> None:
    """Write the ds_config of an engine, for a run by hand."""
    found = json.loads(settings.ds_config)
    section = {"device_budget": settings.device_budget, **found.get(SECTION, {})}
    found[SECTION] = {"enabled": is_enabled, **section}
    path.write_text(json.dumps(found, indent=2))


def make_model(folder: Path, shape: LlamaShape) -> None:
    """Make the checkpoint, in a process of its own.

    Raises:
        FinepageError: It failed.
    """
    print("making a Llama checkpoint", file=sys.stderr, flush=True)
    log, module = folder / "checkpoint.log", "ds_finepage.compare.checkpoint"
    text = json.dumps(dataclasses.asdict(shape))
    status = run_process(["-m", module, folder / "model", text], log)
    if status:
        raise FinepageError(
            f"the process 'checkpoint' ended with status {status}: {last_line(log)} "
            "(--keep DIR keeps the whole log.)"
        )


# After them.


def require_all(results: Results) -> None:
    """Refuse to go on if an engine did not run.

    Raises:
        FinepageError: Names the first one that did not, and why.
    """
    for found in results.runs:
        if found.reason is not None:
            raise FinepageError(
                f"{ARMS[found.arm].title} did not run: {found.reason} (--keep DIR keeps all logs.)"
            )


def of_ranks(results: Results) -> list[list[Run]]:
    """Return the runs of both engines, ours last, once for each rank."""
    runs = [run for run in results.runs if run.arm in ENGINES]
    num_ranks = len(runs[-1].ranks)
    return [[run.of_rank(n) for run in runs] for n in range(num_ranks)] or [runs]


Cell = Callable[[Run], str]


def _bytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


def _later_call(run: Run, num_steps: int) -> str:
    return format_ns((run.prefill.wall_ns or 0) + num_steps * (run.decode.wall_ns or 0))


def to_table(results: Results) -> Table:
    """Return the table, with a line for each figure of each rank."""
    assert results.settings is not None
    num_steps, ranks = results.settings.new_tokens - 1, of_ranks(results)
    form = json.loads(results.settings.ds_config).get(SECTION, {}).get("weights")
    over = "" if len(ranks) == 1 else f" a rank, over {len(ranks)} ranks"
    packed = "" if form is None else f" in {form}"
    title = f"Llama, {_bytes(ranks[0][-1].weight_bytes)} of weights{packed}{over}"
    lines: tuple[tuple[str, Cell, Cell], ...] = (
        (
            "tokens equal to plain transformers",
            lambda r: "yes" if r.tokens_equal else "no",
            lambda r: "",
        ),
        (
            "peak device bytes",
            lambda r: _bytes(r.peak_bytes),
            lambda r: f"<= {_bytes(r.budget_bytes)} (budget)",
        ),
        (
            "reloaded in a prefill",
            lambda r: _bytes(r.prefill.h2d_bytes),
            lambda r: f">= {_bytes(r.prefill.lower_bound_bytes)}",
        ),
        (
            "reloaded in a steady decode step",
            lambda r: _bytes(r.decode.h2d_bytes),
            lambda r: f">= {_bytes(r.decode.lower_bound_bytes)}",
        ),
        ("wall time, first call", lambda r: format_ns(r.first_call_ns or 0), lambda r: ""),
        ("wall time, a later call", lambda r: _later_call(r, num_steps), lambda r: ""),
    )
    rows = [
        (
            label if len(ranks) == 1 else f"{label}, rank {rank}",
            *map(cell, runs),
            limit(runs[-1]),
        )
        for label, cell, limit in lines
        for rank, runs in enumerate(ranks)
    ]
    headings = ("engine", "stock ZeRO-Inference", "ds_finepage", "limit or bound")
    columns = [(heading, itemgetter(number)) for number, heading in enumerate(headings)]
    return table_of(title, columns, rows, ("engine",))


def notes_below(results: Results) -> str:
    """Return what has to be known about the figures."""
    on_cpu, num_ranks = compare.device_type() == "cpu", len(of_ranks(results))
    notes = (
        (NOTES, True),
        (NOTES_CPU, on_cpu),
        (NOTES_RANKS, num_ranks > 1),
        (NOTES_CPU_RANKS, on_cpu and num_ranks > 1),
    )
    return "\n".join(note for note, holds in notes if holds)


def example(name: str) -> Path:
    """Return the path of an example: in the installed package, or beside it in a checkout."""
    package = Path(ds_finepage.__file__).parent
    installed = package / "examples" / name
    return installed if installed.exists() else package.parent / "examples" / name


def by_hand(folder: Path, num_ranks: int) -> str:
    """Return the command that runs ds_finepage on a kept folder."""
    folder = folder.resolve()
    words = ["deepspeed", "--num_gpus", str(num_ranks), str(example("generate.py"))]
    words += ["--model", str(folder / "model"), "--prompt", PROMPT]
    words += ["--deepspeed", "--deepspeed_config", str(folder / "finepage.json")]
    return shlex.join(words)
