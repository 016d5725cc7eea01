"""The command line, one module a subcommand.

A subcommand is a module. Its docstring is the help. It has two functions:
``add_arguments(parser)`` and ``run(arguments) -> exit status``.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import logging
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import ds_finepage
from ds_finepage.errors import FinepageError

PROGRAM = "ds-finepage"
ON_PLANS = ("check", "curve", "grid", "probe", "report", "trace")
COMMANDS = ("demo", "serve", "chat", "compare", "plan", *ON_PLANS)
INTERRUPTED, TERMINATED = 130, 143
"""Exit statuses after Ctrl-C and after SIGTERM, as shells have them."""

OBJECTS_TO_COLLECT = 100_000
"""New objects that the collector waits for; Python itself waits for some hundred."""

LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)
"""The logging level for each number of ``-v``."""

QUIET = ("torchao", "torch.utils._pytree")
"""Loggers of libraries that warn of their own files while they are imported; ``-v`` shows it."""


class Terminated(KeyboardInterrupt):
    """SIGTERM has come; everything ends as after Ctrl-C."""


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Raise :class:`Terminated` in the main thread on SIGTERM, so that a command cleans up.

    A handler that is there already stays.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(*_: object) -> None:
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ds-finepage``; return its exit status.

    The one place where errors become messages and exit statuses.
    """
    argv = sys.argv[1:] if argv is None else argv
    arguments = make_parser(argv).parse_args(argv)
    arguments.typed = shlex.join([PROGRAM, *argv])
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    level = LEVELS[min(arguments.verbose, len(LEVELS) - 1)]
    logging.getLogger(ds_finepage.__name__).setLevel(level)
    if not arguments.verbose:
        quieten_libraries()
    try:
        with sigterm_interrupts(), rare_collections():
            status = arguments.run(arguments)
        assert isinstance(status, int)
        return status
    except FinepageError as error:
        print(f"ds-finepage: {error}", file=sys.stderr)
        return error.exit_status
    except Terminated:
        print("ds-finepage: terminated", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        print("ds-finepage: interrupted", file=sys.stderr)
        return INTERRUPTED


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let Python's collector walk young objects rarely: imports and plans make many that stay."""
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS_TO_COLLECT, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def quieten_libraries() -> None:
    """Hide what libraries warn of while they are imported."""
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.ERROR)


class CommandParser(argparse.ArgumentParser):
    """Reads the options of one subcommand, and refuses others with its own usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Read the options; argparse alone would leave unknown ones to the overview's usage."""
        found, others = super().parse_known_args(args, namespace)
        if others:
            self.error(f"unrecognized arguments: {' '.join(others)}")
        return found, others


def make_parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Build the parser of all subcommands, or of the one that is asked for.

    Only what is in the parser is imported, so that ``check`` verifies a plan without the planner.

    Args:
        argv: The arguments of the command line.
    """
    asked = next((word for word in argv if not word.startswith("-")), "")
    purpose = (ds_finepage.__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog=PROGRAM, description=purpose)
    parser.add_argument("--version", action="version", version=ds_finepage.__version__)
    verbose: dict[str, Any] = {
        "action": "count",
        "help": "log what the program does; -vv logs more",
    }
    parser.add_argument("-v", "--verbose", default=0, **verbose)
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", title="commands", parser_class=CommandParser
    )
    for name in (asked,) if asked in COMMANDS else COMMANDS:
        module = import_module(f"ds_finepage.cli.{name}")
        text = inspect.getdoc(module) or ""
        command = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument("-v", "--verbose", default=argparse.SUPPRESS, **verbose)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
