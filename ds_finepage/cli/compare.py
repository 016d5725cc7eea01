"""Compare every engine on one model under one device budget.

Runs each arm in a process of its own, with the same weights, prompts, dtype, batch and cache: plain
transformers, ZeRO-Inference with its defaults and with settings searched for the budget, and
ds_finepage. With --arms all also Accelerate, static shares and the published algorithm. Names the
fastest one that holds the budget, and prints the settings of those that were tuned.
With --ranks 2 DeepSpeed's engines run on two ranks of this machine, with a shard of the model each.

On an accelerator the budget is enforced for every arm, and times are measured. On the CPU bytes
are counted, and times are modelled for the card of --hardware.

Exit status: 0; 1 if tokens differ or ds_finepage exceeded the budget; 2 for an option that cannot
be used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from ds_finepage.capture.shipped import config_text
from ds_finepage.cli.options import (
    PROGRAM,
    RUNS,
    add_ranks,
    add_weights,
    counts_of,
    names_of,
    one_form_of,
)
from ds_finepage.cli.output import add_json, show
from ds_finepage.compare.arms import ARMS, DEFAULT, arms_named
from ds_finepage.compare.judge import problems_of, winners
from ds_finepage.compare.processes import require_ranks
from ds_finepage.config import BUDGET_FORMS, SECTION, DeviceBudget, FinepageConfig, section_of
from ds_finepage.errors import ConfigError
from ds_finepage.files import read_file
from ds_finepage.graph.packed import UNPACKED
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.policies import POLICIES
from ds_finepage.reporting.results import (
    RESULTS_FILE,
    CompareSettings,
    Results,
    load_results,
)
from ds_finepage.reporting.tables import footnotes, remarks, tables
from ds_finepage.reporting.tabular import table_of

MIN_NEW_TOKENS = 4
"""With fewer tokens no decode step is steady: the first one follows the prefill."""

MIN_PROMPT_TOKENS = 2
CPU_HARDWARE, OTHER_HARDWARE = "t4", "h200"
"""The profiles that times are modelled for, by the device that runs; a budget must fit it."""

BUDGET = "50%weights"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``ds-finepage compare``."""
    add_json(parser)
    parser.add_argument(
        "--model",
        required=True,
        help="folder of a transformers checkpoint; or a name shipped with the package, or a "
        "config.json: random weights of that shape, with --layers",
    )
    parser.add_argument("--layers", type=int, metavar="N", help="layers of such a shape (all)")
    parser.add_argument(
        "--ds-config",
        type=Path,
        metavar="FILE",
        help="ds_config of all arms that DeepSpeed runs; by default ZeRO stage 3 in the host's "
        "memory, in bfloat16",
    )
    parser.add_argument(
        "--device-budget",
        metavar="BUDGET",
        help=f"limit on all device bytes (the ds_config's, else {BUDGET}): {BUDGET_FORMS}".replace(
            "%", "%%"
        ),
    )
    add_weights(parser)
    add_ranks(parser, RUNS)
    parser.add_argument("--batch", default="1", metavar="B,...", help="sequences in the batch (1)")
    parser.add_argument("--prompt", type=int, default=512, metavar="N", help="tokens of it (512)")
    parser.add_argument("--new", type=int, default=32, metavar="N", help="tokens to generate (32)")
    parser.add_argument(
        "--arms",
        default=",".join(DEFAULT),
        help=f"all, or names of: {', '.join(ARMS)} ({','.join(DEFAULT)})",
    )
    parser.add_argument("--hardware", help="the profile that times are modelled for (t4 on a CPU)")
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="timed calls; medians count (3)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="keep figures, plans and logs there"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on in --out; finished runs are kept"
    )
    parser.set_defaults(is_demo=False)


def run(arguments: argparse.Namespace, show: Callable[[Results], None] | None = None) -> int:
    """Run ``ds-finepage compare``.

    Args:
        arguments: The options.
        show: Prints the results; by default all tables.
    """
    settings = settings_of(arguments)
    if arguments.resume and arguments.out is None:
        raise ConfigError("--resume goes on in a folder. Name it by --out.")
    start = None if arguments.out is None else earlier(arguments.out, settings, arguments.resume)
    results = start or Results.of_today(settings, device_name(), arguments.typed)
    try:
        with work_folder(arguments.out) as folder:
            results = compare(settings, folder, results, limits_stock=not arguments.is_demo)
    except KeyboardInterrupt:
        if arguments.out is not None:
            print(
                f"{PROGRAM}: finished runs are in {arguments.out}; --resume goes on",
                file=sys.stderr,
            )
        raise
    if arguments.json:
        print(json.dumps(dataclasses.asdict(results), indent=1))
    else:
        (show or print_results)(results)
    problems = problems_of(results)
    if arguments.is_demo:
        failed = (run for run in results.runs if run.reason is not None)
        problems += [f"{run.arm} did not run: {run.reason}" for run in failed]
    for problem in problems:
        print(f"{PROGRAM}: {problem}", file=sys.stderr)
    return 1 if problems else 0


def compare(
    settings: CompareSettings, folder: Path, start: Results, *, limits_stock: bool = True
) -> Results:
    """Run what is not finished.

    Args:
        settings: The user's decisions.
        folder: Where everything is kept.
        start: The results so far.
        limits_stock: Arms that do not run by plan have the budget enforced too.
    """
    # This imports torch, which takes time; an option that cannot be used is refused before.
    from ds_finepage.compare.orchestrate import Comparison

    console, device = Console(stderr=True), device_type()
    return Comparison(
        settings, folder, console, device=device, start=start, limits_stock=limits_stock
    ).run()


# Options.


def settings_of(arguments: argparse.Namespace) -> CompareSettings:
    """Read the options.

    Raises:
        ConfigError: One of them cannot be used.
    """
    for option, least in (("new", MIN_NEW_TOKENS), ("prompt", MIN_PROMPT_TOKENS), ("repeats", 1)):
        if getattr(arguments, option) < least:
            raise ConfigError(
                f"--{option}: {getattr(arguments, option)} is too few. Write at least {least}."
            )
    path = Path(arguments.model)
    if arguments.layers is not None and (arguments.layers < 1 or path.is_dir()):
        raise ConfigError(
            f"--layers: {arguments.layers} cannot be used. Write 1 or more, for a shipped name or "
            "a config.json; a checkpoint has the layers that it has."
        )
    config_text(arguments.model)  # refuses one that is not there
    require_ranks(arguments.ranks)
    ds_config = with_weights(read_ds_config(arguments.ds_config), arguments)
    if arguments.ranks > 1:
        ds_config = with_ranks(ds_config, arguments)
    default = CPU_HARDWARE if device_type() == "cpu" else OTHER_HARDWARE
    hardware = arguments.hardware or default
    load_profile(hardware)
    budget = arguments.device_budget or ds_config.get(SECTION, {}).get("device_budget", BUDGET)
    return CompareSettings(
        model=str(path.resolve()) if path.exists() else arguments.model,
        layers=arguments.layers,
        ds_config=json.dumps(ds_config),
        device_budget=str(DeviceBudget.parse(budget, name="--device-budget")),
        batches=tuple(counts_of(arguments.batch, "--batch")),
        prompt_tokens=arguments.prompt,
        new_tokens=arguments.new,
        arms=tuple(arm.name for arm in arms_named(names_of(arguments.arms, "--arms"))),
        hardware=hardware,
        repeats=arguments.repeats,
        num_ranks=arguments.ranks,
    )


def read_ds_config(path: Path | None) -> dict[str, Any]:
    """Read the user's ds_config; without one, return the one of the examples.

    Raises:
        ConfigError: It is no ds_config for ZeRO-Inference.
    """
    if path is None:
        offload = {"device": "cpu", "pin_memory": device_type() != "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "offload_param": offload},
        }
    try:
        text = read_file(path)
    except ConfigError as error:
        raise ConfigError(
            f"--ds-config: {error}. configs/finepage_cpu.json is an example."
        ) from error
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--ds-config: {path} is not JSON: {error}") from error
    found = found if isinstance(found, dict) else {}
    zero = found.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    target = zero.get("offload_param")
    if zero.get("stage") != 3 or not isinstance(target, dict) or target.get("device") != "cpu":
        raise ConfigError(
            f"--ds-config: {path} is not for ZeRO-Inference. zero_optimization.stage must be 3 and "
            'zero_optimization.offload_param.device "cpu"; configs/finepage_cpu.json is an example.'
        )
    FinepageConfig.from_dict(section_of(found), policies=POLICIES)
    return found


def with_weights(ds_config: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the form of the weights into a ds_config.

    Args:
        ds_config: The user's ds_config.
        arguments: The options.

    Raises:
        ConfigError: The form cannot be used, or the ds_config computes in another dtype.
    """
    form = one_form_of(arguments)
    if form is None:
        return ds_config
    section = {k: v for k, v in ds_config.get(SECTION, {}).items() if not k.startswith("weights")}
    if form != UNPACKED:
        section |= {"weights": form, "weights_group": arguments.weights_group}
    elif not ds_config.get("bf16", {}).get("enabled"):
        raise ConfigError(
            "--weights: bf16 is not the dtype of the ds_config. Write bf16.enabled there, or leave "
            "the option out."
        )
    others = {key: value for key, value in ds_config.items() if key != SECTION}
    return {**others, SECTION: section} if section else others


def with_ranks(ds_config: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Write the number of ranks into a ds_config; the default one computes in float32 then.

    Sums over ranks round differently than those of one process, and in bfloat16 that shows.

    Args:
        ds_config: The ds_config so far.
        arguments: The options.

    Raises:
        ConfigError: The model cannot be cut over the ranks, its weights are packed, or the
            ds_config is for another number of ranks.
    """
    from ds_finepage.capture.models import load_model_config
    from ds_finepage.capture.shards import require_heads

    num_ranks, key = arguments.ranks, "tensor_parallel"
    if ds_config.get(SECTION, {}).get("weights") is not None:
        raise ConfigError("--weights: packed weights are not cut over ranks. Leave out --ranks.")
    require_heads(load_model_config(arguments.model), num_ranks, arguments.model)
    given = ds_config.get(key, {})
    size = given.get("autotp_size", num_ranks)
    if size != num_ranks:
        raise ConfigError(
            f"--ranks: {num_ranks} ranks were asked for, and tensor_parallel.autotp_size is {size} "
            "in the ds_config. Write the same number."
        )
    changes: dict[str, Any] = {key: {**given, "autotp_size": num_ranks}}
    if arguments.ds_config is None:
        changes["bf16"] = {"enabled": False}
    return {**ds_config, **changes}


def device_type() -> str:
    """Return the kind of the device that runs."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def device_name() -> str:
    """Return the device that runs, in words."""
    from ds_finepage.execution.device import device_of

    return device_of(device_type()).name


# Folders.


@contextmanager
def work_folder(out: Path | None) -> Iterator[Path]:
    """Yield the folder to keep, or a temporary one.

    Raises:
        ConfigError: The folder cannot be made.
    """
    if out is None:
        with tempfile.TemporaryDirectory(prefix="ds-finepage-") as name:
            yield Path(name)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {out}: {error}") from error
    yield out.resolve()


def earlier(out: Path, settings: CompareSettings, resume: bool) -> Results | None:
    """Return the finished runs of an earlier comparison in a folder; None if there is none.

    Args:
        out: The folder.
        settings: The decisions of now.
        resume: Go on with it.

    Raises:
        ConfigError: There are results and they are not to be resumed, or they have other settings.
    """
    if not (out / RESULTS_FILE).exists():
        if out.exists() and (not out.is_dir() or any(out.iterdir())) and not resume:
            raise ConfigError(f"--out: {out} exists and is not an empty folder. Name a new one.")
        return None
    if not resume:
        raise ConfigError(f"--out: {out} has results. Go on with --resume, or name a new folder.")
    found = load_results(out)
    if found.settings is None:
        raise ConfigError(f"--out: {out} is the report of a single run, and no comparison.")
    before, now = dataclasses.asdict(found.settings), dataclasses.asdict(settings)
    differences = [
        f"{name} was {before[name]!r} and is {now[name]!r}"
        for name in now
        if before[name] != now[name]
    ]
    if differences:
        raise ConfigError(
            f"--resume: {out} was made with other settings: {'; '.join(differences)}. Give the "
            "same ones, or name a new folder."
        )
    kept = tuple(r for r in found.runs if r.reason is None or r.out_of_memory)
    return dataclasses.replace(found, runs=kept)


# Output.


def print_results(results: Results) -> None:
    """Print the tables of all batches, the winners and the settings."""
    assert results.settings is not None
    for batch in results.settings.batches:
        for t in tables(results, batch):
            show(table_of(t.title, t.columns, t.runs, ("arm", "why"), is_narrow=True))
        for winner in winners(results, batch):
            print(f"Batch {batch}, {winner.text()}.")
        for line in remarks(results, batch):
            print(line)
        print()
    print(footnotes(results))
