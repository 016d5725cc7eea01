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
import json
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.table import Table

import ds_finepage
from ds_finepage.cli import compare
from ds_finepage.cli.options import PROGRAM, add_weights, one_form_of, refuse_packed_ranks
from ds_finepage.cli.output import add_json, show
from ds_finepage.compare.arms import ARMS, OURS, PLAIN
from ds_finepage.compare.checkpoint import LlamaShape, config_of
from ds_finepage.compare.judge import problems_of
from ds_finepage.compare.processes import last_line, require_ranks, run_process
from ds_finepage.config import SECTION, FinepageConfig
from ds_finepage.errors import ConfigError, FinepageError
from ds_finepage.graph.packed import UNPACKED
from ds_finepage.planning.policies import RUNNABLE
from ds_finepage.reporting.results import CompareSettings, Results, Run
from ds_finepage.reporting.tabular import table_of
from ds_finepage.units import format_bytes, format_ns

PROMPT = "The planner never sees torch; the executor never decides."
PROMPT_TOKENS = 16
ENGINES = {"zero": "zero_inference", OURS: "finepage"}
"""The arms of the table, by their names in ``--json``."""

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
        "--new-tokens", type=int, default=32, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep checkpoint, ds_configs and logs there"
    )
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Run ``ds-finepage demo``."""
    shape = shape_of(arguments)
    section = {"device_budget": arguments.budget, **packing_of(arguments, shape)}
    FinepageConfig.from_dict(section, policies=RUNNABLE)  # refuse before any work
    compare.require_new_tokens("--new-tokens", arguments.new_tokens)
    with work_folder(arguments.keep) as folder:
        settings = settings_of(arguments, shape, section, folder)
        for name in ENGINES.values():
            write_config(folder / f"{name}.json", settings, is_enabled=name == SECTION)
        make_model(folder, shape)
        results = compare.compare(
            settings, folder, compare.new_results(settings, arguments.typed), limits_stock=False
        )
    require_all(results)
    form = section.get("weights")
    if arguments.json:
        print(json.dumps(to_dict(results, form)))
    else:
        show(to_table(results, form))
        print(notes_below(results))
    problems = problems_of(results)
    for problem in problems:
        print(f"{PROGRAM}: {problem}", file=sys.stderr)
    if arguments.keep is not None and not arguments.json:
        print(f"\nBy hand:\n\n    {by_hand(arguments.keep, arguments.ranks)}")
    return 1 if problems else 0


# Before the runs.


def shape_of(arguments: argparse.Namespace) -> LlamaShape:
    """Return the model of the demo.

    Args:
        arguments: The options.

    Raises:
        ConfigError: The ranks cannot be started, or the model cannot be cut over them.
    """
    shape, num_ranks = TINY if arguments.tiny else LlamaShape(), arguments.ranks
    require_ranks(num_ranks)
    refuse_packed_ranks(num_ranks, one_form_of(arguments))
    if num_ranks == 1:
        return shape
    from ds_finepage.capture.shards import require_heads  # imports torch

    require_heads(config_of(shape), num_ranks, "the demo's Llama")
    return replace(shape, dtype="float32")


def packing_of(arguments: argparse.Namespace, shape: LlamaShape) -> dict[str, Any]:
    """Return the keys of the section that pack the weights; none if they are not to be packed.

    Args:
        arguments: The options.
        shape: The model.

    Raises:
        ConfigError: The form cannot be used, or does not suit the model.
    """
    form = one_form_of(arguments)
    if form in (None, UNPACKED):
        return {}
    from ds_finepage.packing.form import PackedForm  # imports torch

    for width in (shape.hidden_size, shape.intermediate_size):
        PackedForm.parse(str(form), arguments.weights_group).require((1, width))
    return {"weights": form, "weights_group": arguments.weights_group}


def settings_of(
    arguments: argparse.Namespace, shape: LlamaShape, section: dict[str, Any], folder: Path
) -> CompareSettings:
    """Return the comparison that the demo is."""
    ranks = {"tensor_parallel": {"autotp_size": arguments.ranks}} if arguments.ranks > 1 else {}
    ds_config = {
        **compare.read_ds_config(None),
        "bf16": {"enabled": shape.dtype == "bfloat16"},
        **ranks,
        SECTION: section,
    }
    return CompareSettings(
        model=str(folder / "model"),
        layers=None,
        ds_config=json.dumps(ds_config),
        device_budget=arguments.budget,
        batches=(1,),
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=arguments.new_tokens,
        arms=(PLAIN, *ENGINES),
        hardware=compare.default_hardware(),
        repeats=1,
        num_ranks=arguments.ranks,
    )


def write_config(path: Path, settings: CompareSettings, *, is_enabled: bool) -> None:
    """Write the ds_config of an engine, for a run by hand."""
    found = json.loads(settings.ds_config)
    found[SECTION] = {"enabled": is_enabled, **found[SECTION]}
    path.write_text(json.dumps(found, indent=2))


def make_model(folder: Path, shape: LlamaShape) -> None:
    """Make the checkpoint, in a process of its own.

    Raises:
        FinepageError: It failed.
    """
    print("making a Llama checkpoint", file=sys.stderr, flush=True)
    log, module = folder / "checkpoint.log", "ds_finepage.compare.checkpoint"
    status = run_process(["-m", module, folder / "model", json.dumps(asdict(shape))], log)
    if status:
        raise FinepageError(
            f"the process 'checkpoint' ended with status {status}: {last_line(log)} "
            "(--keep DIR keeps the whole log.)"
        )


@contextmanager
def work_folder(keep: Path | None) -> Iterator[Path]:
    """Yield an empty folder: the one to keep, or a temporary one.

    Raises:
        ConfigError: The folder to keep is a file, or not empty.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="ds-finepage-demo-") as name:
            yield Path(name)
        return
    if keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise ConfigError(f"--keep: {keep} exists and is not an empty folder. Name a new one.")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()


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


def of_ranks(results: Results) -> list[dict[str, Run]]:
    """Return the runs of both engines by their names in ``--json``, once for each rank."""
    runs = {ENGINES[run.arm]: run for run in results.runs if run.arm in ENGINES}
    num_ranks = len(runs["finepage"].ranks)
    if not num_ranks:
        return [runs]
    return [{name: r.of_rank(n) for name, r in runs.items()} for n in range(num_ranks)]


def to_dict(results: Results, form: str | None) -> dict[str, Any]:
    """Return one object for ``--json``, or one for each rank.

    Args:
        results: The runs.
        form: The packed form of the weights; None if they are not packed.
    """
    found = []
    for runs in of_ranks(results):
        ours = runs["finepage"]
        found.append(
            {
                "budget_bytes": ours.budget_bytes,
                "weight_bytes": ours.weight_bytes,
                **({} if form is None else {"weights": form}),
                "engines": {name: _figures(run) for name, run in runs.items()},
            }
        )
    return found[0] if len(found) == 1 else {"ranks": found}


def _figures(run: Run) -> dict[str, Any]:
    bound = {"decode_lower_bound_bytes": run.decode.lower_bound_bytes} if run.arm == OURS else {}
    return {
        "tokens_equal": run.tokens_equal,
        "peak_bytes": run.peak_bytes,
        "prefill_reloaded_bytes": run.prefill.h2d_bytes,
        "decode_reloaded_bytes": run.decode.h2d_bytes,
        **bound,
        "wall_s": round((run.first_call_ns or 0) / 1e9, 3),
    }


Cell = Callable[[Run], str]


def _bytes(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)


def _later_call(run: Run, num_steps: int) -> str:
    return format_ns((run.prefill.wall_ns or 0) + num_steps * (run.decode.wall_ns or 0))


def to_table(results: Results, form: str | None) -> Table:
    """Return the table, with a line for each figure of each rank.

    Args:
        results: The runs.
        form: The packed form of the weights; None if they are not packed.
    """
    assert results.settings is not None
    num_steps, ranks = results.settings.new_tokens - 1, of_ranks(results)
    ours = ranks[0]["finepage"]
    over = "" if len(ranks) == 1 else f" a rank, over {len(ranks)} ranks"
    packed = "" if form is None else f" in {form}"
    title = f"Llama, {_bytes(ours.weight_bytes)} of weights{packed}{over}"
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
            *map(cell, runs.values()),
            limit(runs["finepage"]),
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
