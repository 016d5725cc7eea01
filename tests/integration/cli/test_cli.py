from __future__ import annotations

import argparse
import gc
import logging
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import SimpleNamespace

import pytest

from ds_finepage import __version__, cli
from ds_finepage.errors import CaptureError, ConfigError, FinepageError, PlanInfeasibleError


class Command(SimpleNamespace):
    """A subcommand ``fake`` whose ``run`` a test sets."""

    def raises(self, error: BaseException) -> None:
        def run(_: argparse.Namespace) -> int:
            raise error

        self.run = run


def ended(*words: str) -> object:
    """Call a command that argparse ends; return the status."""
    with pytest.raises(SystemExit) as caught:
        cli.main(list(words))
    return caught.value.code


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    module = Command(
        __doc__="Do a thing.\n\nAnd more.",
        add_arguments=lambda parser: parser.add_argument("--number", type=int, default=0),
        run=lambda arguments: arguments.number,
    )
    monkeypatch.setitem(sys.modules, "ds_finepage.cli.fake", module)
    monkeypatch.setattr(cli, "COMMANDS", ("fake",))
    return module


def test_the_exit_status_is_the_commands(command: Command) -> None:
    assert cli.main(["fake"]) == 0
    assert cli.main(["fake", "--number", "3"]) == 3


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ConfigError("no"), 2, "no"),
        (PlanInfeasibleError("no"), 2, "no"),
        (FinepageError("no"), 1, "no"),
        (CaptureError("no"), 1, "no"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_become_messages(
    command: Command,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    status: int,
    message: str,
) -> None:
    command.raises(error)
    assert cli.main(["fake"]) == status == getattr(error, "exit_status", 130)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"ds-finepage: {message}\n")


def test_sigterm_ends_a_command_as_an_interrupt_does(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[str] = []

    def run(_: argparse.Namespace) -> int:
        assert callable(signal.getsignal(signal.SIGTERM))  # else the signal would end the tests
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            heard.append("interrupt")
            raise
        return 0

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        command.run = run
        assert cli.main(["fake"]) == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert capsys.readouterr().err == "ds-finepage: terminated\n"
        signal.signal(signal.SIGTERM, lambda *_: heard.append("own"))
        assert cli.main(["fake"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == ["interrupt", "own"]


def test_objects_are_collected_rarely_while_a_command_runs(command: Command) -> None:
    before, seen = gc.get_threshold(), []

    def run(_: argparse.Namespace) -> int:
        seen.append(gc.get_threshold())
        raise FinepageError("ends")

    command.run = run
    assert cli.main(["fake"]) == FinepageError.exit_status
    assert seen == [(cli.OBJECTS_TO_COLLECT, *before[1:])] and gc.get_threshold() == before


def test_a_command_runs_in_a_thread_too(command: Command) -> None:
    command.run = lambda _: 7  # a thread cannot handle signals
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(cli.main, ["fake"]).result() == 7


def test_our_own_mistakes_are_not_hidden(command: Command) -> None:
    command.raises(AssertionError("a bug"))
    with pytest.raises(AssertionError, match="a bug"):
        cli.main(["fake"])


@pytest.mark.parametrize("arguments", [[], ["no-such-command"], ["demo", "--no-such-option"]])
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(*arguments) == 2
    assert "usage: ds-finepage" in capsys.readouterr().err


def test_a_wrong_option_is_answered_with_the_usage_of_its_command(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended("fake", "--numbers", "3", "--no-such-option") == 2
    usage, error = capsys.readouterr().err.strip().rsplit("\n", 1)
    assert usage.startswith("usage: ds-finepage fake ") and "--number NUMBER" in usage
    assert error == "ds-finepage fake: error: unrecognized arguments: --numbers 3 --no-such-option"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_modules_docstring_is_its_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(name, "--help") == 0
    text = import_module(f"ds_finepage.cli.{name}").__doc__
    assert text is not None
    assert text.strip() in capsys.readouterr().out


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--help") == 0
    out = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"\n    {name} " in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("--version") == 0
    assert capsys.readouterr().out.strip() == __version__


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["fake"], ["WARNING"]),
        (["-v", "fake"], ["WARNING", "INFO"]),
        (["fake", "-v"], ["WARNING", "INFO"]),
        (["fake", "-vv"], ["WARNING", "INFO", "DEBUG"]),
        (["fake", "--verbose", "-vv"], ["WARNING", "INFO", "DEBUG"]),
    ],
    ids=str,
)
def test_verbose_sets_the_level_of_the_log(
    command: Command, caplog: pytest.LogCaptureFixture, arguments: list[str], expected: list[str]
) -> None:
    levels = (logging.WARNING, logging.INFO, logging.DEBUG)
    logged: list[str] = []

    def run(_: argparse.Namespace) -> int:
        logger = logging.getLogger("ds_finepage.anything")
        logged.extend(logging.getLevelName(v) for v in levels if logger.isEnabledFor(v))
        return 0

    command.run = run
    caplog.set_level(logging.WARNING, logger="ds_finepage")  # restores the level afterwards
    assert cli.main(arguments) == 0
    assert logged == expected


def without_anything_heavy(code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that says at its end which heavy packages it has imported."""
    heavy = "('torch', 'deepspeed', 'transformers')"
    code = f"import sys; {code}; print([name for name in {heavy} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True)


def test_help_starts_without_anything_heavy() -> None:
    done = without_anything_heavy("from ds_finepage.cli import make_parser; make_parser()")
    assert done.stdout.strip() == "[]"


def test_a_wrong_model_is_refused_before_anything_heavy() -> None:
    commands = [
        [name, option, "nosuch", "--hardware", "t4"]
        for name, option in (
            ("plan", "--model"),
            ("curve", "--model"),
            ("grid", "--models"),
            ("compare", "--model"),
        )
    ]
    done = without_anything_heavy(
        f"from ds_finepage.cli import main; print([main(c) for c in {commands}])"
    )
    assert done.stdout.split("\n") == ["[2, 2, 2, 2]", "[]", ""]
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 4
    assert all("unknown model 'nosuch'. Known: " in line for line in lines)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("plan", "--batch"),
        ("plan", "--seq"),
        ("plan", "--ranks"),
        ("curve", "--batch"),
        ("curve", "--seq"),
        ("curve", "--ranks"),
        ("grid", "--ranks"),
    ],
)
def test_a_count_below_1_is_refused_by_the_name_of_its_option(
    name: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = "--models" if name == "grid" else "--model"
    assert cli.main([name, model, "llama-7b", "--hardware", "t4", option, "0"]) == 2
    assert capsys.readouterr().err == (
        f"ds-finepage: {option}: 0 is less than 1. Write 1 or more.\n"
    )


@pytest.mark.parametrize(("arguments", "expected"), [(["fake"], False), (["fake", "-v"], True)])
def test_libraries_that_are_imported_warn_of_themselves_with_verbose_alone(
    command: Command, caplog: pytest.LogCaptureFixture, arguments: list[str], expected: bool
) -> None:
    shown: list[bool] = []

    def run(_: argparse.Namespace) -> int:
        loggers = map(logging.getLogger, (*cli.QUIET, "torchao.kernel.intmm"))
        shown.extend(logger.isEnabledFor(logging.WARNING) for logger in loggers)
        return 0

    command.run = run
    for name in ("ds_finepage", *cli.QUIET):
        caplog.set_level(logging.WARNING, logger=name)  # restores the level afterwards
    assert cli.main(arguments) == 0
    assert shown == [expected] * 3
    assert logging.getLogger("torch").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--budget", "40%"], "--device-budget: '40%' is ambiguous"),
        (["--budget", "lots"], "--device-budget: cannot read 'lots'"),
        (["--new-tokens", "3"], "--new: 3 is too few"),
        (["--keep", __file__], "is not an empty folder. Name a new one."),
    ],
)
def test_the_demo_refuses_at_once(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["demo", *options]) == 2
    assert message in capsys.readouterr().err
