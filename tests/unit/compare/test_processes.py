"""Processes of a command: their logs and ranks, and that none outlives the command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_finepage.compare import leash
from ds_finepage.compare.processes import end, last_line, require_ranks, run_process
from ds_finepage.errors import ConfigError
from ds_finepage.integrations.deepspeed.one_process import GLOO_ALONE

WAITS = "import signal; signal.pause()"
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such a tie")


def test_the_output_of_a_process_is_in_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    code = "import os, sys; print('one'); print(os.environ['HF_HUB_OFFLINE']); sys.exit(3)"
    assert run_process(["-c", code], log) == 3
    assert log.read_text() == "one\n1\n" and last_line(log) == "1"
    log.write_text("")
    assert last_line(log) == "no output"
    with pytest.raises(ConfigError, match="cannot write"):
        run_process(["-c", ""], tmp_path / "no" / "log.txt")


def test_an_interrupt_ends_the_process_and_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    killed: list[tuple[int, int]] = []
    wait, kill = subprocess.Popen.wait, os.killpg

    def interrupted(self: Any, timeout: float | None = None) -> int:
        if started:
            return wait(self, timeout)
        started.append(self)
        raise KeyboardInterrupt

    def killpg(group: int, number: int) -> None:
        killed.append((group, number))
        kill(group, number)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    monkeypatch.setattr(os, "killpg", killpg)
    with pytest.raises(KeyboardInterrupt):
        run_process(["-c", WAITS], tmp_path / "log.txt")
    (process,) = started
    assert killed == [(process.pid, signal.SIGTERM)]  # it is the leader of its group
    assert process.returncode == -signal.SIGTERM


def test_a_process_that_does_not_end_is_killed() -> None:
    code = (
        "import signal; signal.signal(signal.SIGTERM, lambda *_: None); print('here', flush=True)\n"
        "while True: signal.pause()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        end(process, grace_s=0.1)
        assert process.returncode == -signal.SIGKILL
        end(process)  # which does nothing now


@ON_LINUX
def test_a_killed_command_leaves_no_process(tmp_path: Path) -> None:
    """Both write to one pipe, so the output is whole when both have ended."""
    child = (
        "import os, signal; signal.signal(signal.SIGALRM, lambda *_: print('alive')); "
        "signal.alarm(3); os.kill(os.getppid(), signal.SIGKILL); signal.pause()"
    )
    log = tmp_path / "log"
    command = (
        "from pathlib import PosixPath; from ds_finepage.compare.processes import run_process; "
        f"run_process(['-c', {child!r}], {log!r})"
    )
    done = subprocess.run([sys.executable, "-c", command], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert waited_for_no_text(log) == ""


def waited_for_no_text(log: Path) -> str:
    """Return what a process has written, once it would have written if it were alive."""
    subprocess.run([sys.executable, "-c", "import time; time.sleep(4)"], check=True)
    return log.read_text()


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


# Ranks.


def test_each_rank_knows_its_number_and_the_way_to_the_others(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", GLOO_ALONE)
    script = tmp_path / "script.py"
    script.write_text(
        f"import os\nline = ' '.join(['ranks', *(os.environ[name] for name in {names})])\n"
        "os.write(1, f'{line}\\n'.encode())  # at once, or lines of two ranks mix\n"
        "assert os.environ['MASTER_ADDR'] and os.environ['MASTER_PORT']\n"
    )
    log = tmp_path / "log"
    assert run_process([script], log, num_ranks=2) == 0
    lines = sorted(line for line in log.read_text().splitlines() if line.startswith("ranks"))
    assert lines == ["ranks 0 0 2 1", "ranks 1 1 2 1"]


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import os\nassert os.environ['RANK'] == '0'\n{WAITS}\n")
    assert run_process([script], tmp_path / "log", num_ranks=2) != 0


def test_one_rank_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    require_ranks(1)


@pytest.mark.parametrize("num_ranks", [0, -1])
def test_less_than_one_rank(num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=rf"^--ranks: {num_ranks} is less than 1\. Write 1"):
        require_ranks(num_ranks)


def test_ranks_that_cannot_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    require_ranks(2)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: False)
    with pytest.raises(ConfigError, match=r"ranks on cpu talk through gloo, .* without it"):
        require_ranks(2)
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"built without torch\.distributed"):
        require_ranks(2)


def test_each_rank_needs_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("xpu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: True)
    with pytest.raises(ConfigError, match=r"2 ranks need a device each, and there are 1\."):
        require_ranks(2)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    require_ranks(2)
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: False)
    with pytest.raises(ConfigError, match=r"ranks on xpu talk through xccl"):
        require_ranks(2)
