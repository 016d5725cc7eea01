"""No process outlives the command that has started it, however that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.compare import leash
from ds_finepage.compare.children import Children
from ds_finepage.compare.processes import run_process, run_ranks
from ds_finepage.errors import FinepageError, RankError

WAITS = "import signal; signal.pause()"
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such a tie")


def wait_for(log: Path, text: str) -> None:
    """Wait until a log has a text; the limit of pytest ends a wait in vain."""
    while not log.exists() or text not in log.read_text():
        os.sched_yield()


def test_other_threads_hear_of_the_end(tmp_path: Path) -> None:
    children, log = Children(), tmp_path / "one.log"
    logs = [tmp_path / f"{rank}.log" for rank in (0, 1)]
    waits = ["-c", "print('here', flush=True); " + WAITS]
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(run_process, waits, log, children=children)
        two = pool.submit(run_ranks, [waits] * 2, logs, {**os.environ}, children=children)
        for each in (log, *logs):
            wait_for(each, "here")
        children.end()
        assert one.result() == -signal.SIGKILL
        with pytest.raises(RankError, match=r"ended with status -9: here$"):
            two.result()


def test_none_starts_after_the_end(tmp_path: Path) -> None:
    children = Children()
    children.end()
    with pytest.raises(FinepageError, match="starts no more processes"):
        run_process(["-c", ""], tmp_path / "log", children=children)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_a_process_starts_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    began: list[subprocess.Popen[bytes]] = []
    heard: list[int] = []
    start = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        began.append(start(*arguments, **options))
        signal.raise_signal(number)
        return began[0]

    def handler(number: int, _: object) -> None:
        heard.append(number)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    before = signal.signal(number, handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_process(["-c", WAITS], tmp_path / "log")
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
        alive = [process for process in began if process.poll() is None]
        for process in alive:
            process.kill()
            process.wait()
    assert (heard, len(began), alive) == ([number], 1, [])


def test_an_error_while_a_process_starts_gives_handlers_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(TypeError):
            run_process([], tmp_path / "log")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_process_that_has_ended_is_forgotten(tmp_path: Path) -> None:
    children = Children()
    assert run_process(["-c", ""], tmp_path / "log", children=children) == 0
    assert children._running == []


def test_a_process_runs_in_its_folder_with_its_variables(tmp_path: Path) -> None:
    code = "import os; print(os.getcwd(), os.environ['MINE'])"
    log, variables = tmp_path / "log", {**os.environ, "MINE": "yes"}
    assert run_process(["-c", code], log, variables, folder=tmp_path) == 0
    assert log.read_text() == f"{tmp_path} yes\n"


@ON_LINUX
def test_a_killed_command_leaves_no_process() -> None:
    """Both write to one pipe, so the output is whole when both have ended."""
    child = (
        "import os, signal; signal.signal(signal.SIGALRM, lambda *_: print('alive')); "
        "signal.alarm(3); os.kill(os.getppid(), signal.SIGKILL); signal.pause()"
    )
    command = (
        "import os, sys\n"
        "from ds_finepage.compare.children import Children\n"
        f"with Children().started(['-c', {child!r}], sys.stdout.buffer, os.environ) as process:\n"
        "    process.wait()\n"
    )
    done = subprocess.run([sys.executable, "-c", command], stdout=subprocess.PIPE, timeout=60)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")


@ON_LINUX
def test_a_process_whose_parent_is_gone_does_not_start() -> None:
    command = [sys.executable, leash.__file__, "0", sys.executable, "-c", "print('runs')"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "process 0 is gone\n")


def test_elsewhere_a_process_runs_without_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[Any] = []
    monkeypatch.setattr(sys, "platform", "elsewhere")
    monkeypatch.setattr(os, "execv", lambda *command: became.append(command))
    leash.main(["0", "python", "-c", "x"])
    assert became == [("python", ["python", "-c", "x"])]
