"""Options that several subcommands share."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from ds_finepage.config import BUDGET_FORMS, did_you_mean
from ds_finepage.errors import ConfigError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.hosts import HOSTS
from ds_finepage.graph.packed import GROUP, PACKED_FORMS, UNPACKED
from ds_finepage.graph.profiles import load_profile
from ds_finepage.units import parse_bytes, require_count

PROGRAM = "ds-finepage"
PHASES = ("prefill", "decode")
AUTO = "auto"
WEIGHTS = (UNPACKED, *PACKED_FORMS)
"""The forms of weights; all but the first are packed."""


def add_model(parser: argparse.ArgumentParser, *, finds_batch: bool = False) -> None:
    """Add the options for the model, its shape, the machine and the policy.

    Args:
        parser: The parser.
        finds_batch: The batch may be ``AUTO``.
    """
    parser.add_argument(
        "--model",
        required=True,
        help="a name shipped with the package, a directory with a transformers config.json, or "
        "the path of such a file; no weights are read",
    )
    parser.add_argument(
        "--batch",
        type=count_or_auto if finds_batch else int,
        default=1,
        help="sequences in the batch (1)"
        + ("; auto: find the batch that makes most tokens a second" if finds_batch else ""),
    )
    parser.add_argument(
        "--seq",
        type=int,
        default=2048,
        help="tokens of a sequence that are in the KV cache after the pass (2048)",
    )
    parser.add_argument(
        "--hardware",
        required=True,
        help="a hardware profile shipped with the package, or the path of one as 'probe' writes it",
    )
    add_host(parser)
    parser.add_argument("--policy", default="finepage", help="how to plan (finepage)")
    add_split(parser)


def add_host(parser: argparse.ArgumentParser) -> None:
    """Add the option for the host that computes."""
    parser.add_argument(
        "--host",
        choices=sorted(HOSTS),
        help="let the host compute products with weights in its memory where that is faster, as "
        "finepage.host_compute does; a profile that 'probe --host' wrote knows its own",
    )


def machine_of(arguments: argparse.Namespace) -> HardwareProfile:
    """Return the hardware profile; its name has the host that computes behind it from now on.

    Raises:
        ConfigError: There is none, or it cannot be used.
    """
    if arguments.host is not None:
        arguments.hardware += f"+{arguments.host}"
    return load_profile(arguments.hardware)


def count_or_auto(text: str) -> int | str:
    """Read a number, or ``AUTO``."""
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {AUTO!r}") from None


def add_split(parser: argparse.ArgumentParser) -> None:
    """Add the option that keeps weights whole."""
    parser.add_argument(
        "--no-split",
        action="store_true",
        help="keep every weight whole; by default policies that can do so cut matrix products "
        "along their output features",
    )


def add_weights(parser: argparse.ArgumentParser, *, many: bool = False) -> None:
    """Add the options for the form of the weights.

    Args:
        parser: The parser.
        many: Several forms can be named.
    """
    forms = ", ".join(WEIGHTS)
    parser.add_argument(
        "--weights",
        metavar="LIST" if many else "FORM",
        help=f"form of the weights: {forms}; by default as the model is. Bytes, bounds and a "
        "budget in percent of the weights are then those of this form"
        + (". Several with commas in between" if many else ""),
    )
    parser.add_argument(
        "--weights-group",
        type=int,
        default=GROUP,
        metavar="N",
        help="weights that share a scale, where they are packed (%(default)s)",
    )


PREDICTS = (
    "cut the model over N ranks as DeepSpeed's AutoTP does: budget, host memory and figures are "
    "then those of one rank, tokens a second those of all"
)
RUNS = (
    "run every engine that can on N ranks, each with its shard of the model; the budget is that of "
    "one rank"
)


def add_ranks(parser: argparse.ArgumentParser, text: str = PREDICTS) -> None:
    """Add the option for the ranks that the model is cut over."""
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help=f"{text} (%(default)s)")


def require_counts(arguments: argparse.Namespace, *names: str) -> None:
    """Refuse options that count something and are less than 1.

    Args:
        arguments: The options.
        names: The options to look at.

    Raises:
        ConfigError: One of them is less than 1.
    """
    for name in names:
        require_count(getattr(arguments, name), f"--{name}")


def note_link(num_ranks: int, profile: HardwareProfile) -> None:
    """Say on the standard error that the time of collectives is not known, or the host idle."""
    if num_ranks > 1 and profile.has_host:
        note("the host computes nothing where ranks share a model")
    if num_ranks > 1 and not profile.rank_bytes_per_s:
        note(
            f"{profile.name} has no rank_bytes_per_s, so what ranks send to each other takes the "
            f"time of its traffic in device memory"
        )


def note(text: str) -> None:
    """Say something on the standard error that is no error."""
    print(f"{PROGRAM}: note: {text}", file=sys.stderr)


def weights_of(arguments: argparse.Namespace) -> list[str | None]:
    """Read the forms of the weights; one that is None stands for the model as it is.

    Raises:
        ConfigError: Unknown form, or a group that no form has.
    """
    if arguments.weights is None:
        return [None]
    names = names_of(arguments.weights, "--weights")
    for name in names:
        if name not in WEIGHTS:
            raise ConfigError(f"--weights: unknown form {name!r}. {did_you_mean(name, WEIGHTS)}")
    if names != [UNPACKED]:
        from ds_finepage.packing.form import PackedForm  # imports torch: known forms only

        PackedForm.parse(WEIGHTS[-1], arguments.weights_group)
    return list(names)


def one_form_of(arguments: argparse.Namespace) -> str | None:
    """Read the form of the weights of a command that takes one.

    Raises:
        ConfigError: There are several, or the form cannot be used.
    """
    found, *others = weights_of(arguments)
    if others:
        raise ConfigError(f"--weights: {arguments.weights!r} names several forms. Write one.")
    return found


def add_budget(parser: argparse.ArgumentParser) -> None:
    """Add the option with the limit on all device bytes."""
    text = f'{BUDGET_FORMS}. "auto" is the device less 512 MiB for driver and libraries'
    parser.add_argument(
        "--device-budget",
        default="auto",
        metavar="BUDGET",
        help=f"limit on all device bytes (auto): {text}".replace("%", "%%"),
    )


def add_host_memory(parser: argparse.ArgumentParser) -> None:
    """Add the option with the size of the host memory."""
    parser.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="host memory of the machine: weights for which it has no room are read from files in "
        "each pass. By default it has room for all",
    )


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options that are settings of a :class:`Modeller` under any budget.

    Raises:
        ConfigError: The host memory is not a size.
    """
    size = arguments.host_memory
    return {
        "split": not arguments.no_split,
        "host_memory_bytes": None if size is None else parse_bytes(size, name="--host-memory"),
        "weights_group": arguments.weights_group,
        "num_ranks": arguments.ranks,
    }


def add_force(parser: argparse.ArgumentParser) -> None:
    """Add the option that allows overwriting."""
    parser.add_argument("--force", action="store_true", help="overwrite files that exist")


def require_writable(path: Path, *, force: bool) -> None:
    """Refuse a file that cannot be written or must not be overwritten, before any work.

    Raises:
        ConfigError: There is a file already, or no folder for it.
    """
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder. Name a file in it.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}. Make it first.")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists. Give --force to overwrite it, or name another file.")


def names_of(text: str, option: str) -> list[str]:
    """Split a list at its commas and drop repeats.

    Raises:
        ConfigError: The list is empty.
    """
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not names:
        raise ConfigError(f"{option}: {text!r} names nothing. Write names with commas in between.")
    return names


def counts_of(text: str, option: str) -> list[int]:
    """Split a list of whole numbers at its commas and drop repeats.

    Raises:
        ConfigError: An element is not a whole number of 1 or more.
    """
    counts = []
    for part in names_of(text, option):
        if not part.isdecimal() or int(part) < 1:
            raise ConfigError(f"{option}: {part!r} is not a whole number of 1 or more.")
        counts.append(int(part))
    return list(dict.fromkeys(counts))


def command_line(command: str, **options: Any) -> str:
    """Write a command that a person can paste into a shell; options that are None are left out."""
    words = [PROGRAM, command]
    for name, value in options.items():
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
