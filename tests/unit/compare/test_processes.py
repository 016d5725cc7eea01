"""Ranks are started together, find each other, and end together."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_finepage.compare import children, processes
from ds_finepage.compare.children import kill
from ds_finepage.compare.processes import (
    _first_failure,
    meeting_place,
    require_ranks,
    run_ranks,
)
from ds_finepage.errors import ConfigError, RankError
from ds_finepage.integrations.deepspeed.one_process import GLOO_ALONE

WAITS = "import signal; signal.pause()"


def run(*scripts: str, folder: Path, limit_s: float = 60.0) -> list[str]:
    """Run a script on each rank; return their logs."""
    logs = [folder / f"{rank}.log" for rank in range(len(scripts))]
    variables = {**os.environ, "MINE": "yes"}
    commands = [["-c", script] for script in scripts]
    run_ranks(commands, logs, variables, limit_s=limit_s, grace_s=0.0)
    return [log.read_text() for log in logs]


def test_each_rank_knows_its_number_and_the_way_to_the_others(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", GLOO_ALONE, "MINE")
    script = f"import os; print(*(os.environ[name] for name in {names}))"
    found = run(script, script, folder=tmp_path)
    assert found == [f"{rank} {rank} 2 127.0.0.1 1 yes\n" for rank in (0, 1)]


def test_ranks_meet_in_a_store_that_is_there_already() -> None:
    with meeting_place(2) as variables:
        host, port = variables["MASTER_ADDR"], int(variables["MASTER_PORT"])
        assert variables["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        ranks = [torch.distributed.TCPStore(host, port, 2, is_master=False) for _ in "01"]  # type: ignore[attr-defined]
        ranks[0].set("key", "value")
        assert ranks[1].get("key") == b"value"


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    fails = "import sys; print('ValueError: mine\\nand more'); sys.exit(3)"
    with pytest.raises(RankError, match=r"^rank 1 ended with status 3: ValueError: mine$"):
        run(WAITS, fails, WAITS, folder=tmp_path)


def test_the_others_get_little_time_after_a_failure() -> None:
    timeouts: list[float] = []

    class Ended:
        def get(self, timeout: float) -> int:
            timeouts.append(timeout)
            if len(timeouts) == 1:
                return 1
            raise Empty

    ranks: Any = [SimpleNamespace(returncode=None), SimpleNamespace(returncode=3)]
    ended: Any = Ended()
    assert _first_failure(ranks, ended, time.monotonic() + 1000.0, 5.0) == 1
    assert timeouts[0] > 5.0 >= timeouts[1]


def test_the_last_line_stands_for_a_rank_without_an_error(tmp_path: Path) -> None:
    dies = "import os; print('loading', flush=True); os.kill(os.getpid(), 9)"
    with pytest.raises(RankError, match=r"^rank 0 ended with status -9: loading$"):
        run(dies, WAITS, folder=tmp_path)


def test_an_error_of_the_package_is_named_without_its_rank(tmp_path: Path) -> None:
    fails = "raise SystemExit('[rank0]: ds_finepage.errors.RankError: gone\\n[W1] closing')"
    with pytest.raises(RankError, match=r"status 1: ds_finepage.errors.RankError: gone$"):
        run(fails, folder=tmp_path)


def test_ranks_that_take_too_long_are_ended(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"^ranks 0, 1 of 2 were not done after 0 s"):
        run(WAITS, WAITS, folder=tmp_path, limit_s=0.0)


def test_no_rank_outlives_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    def killed(process: Any) -> None:
        kill(process)
        ended.append(process.returncode)

    monkeypatch.setattr(processes, "_first_failure", interrupt)
    monkeypatch.setattr(children, "kill", killed)
    with pytest.raises(KeyboardInterrupt):
        run(WAITS, WAITS, folder=tmp_path)
    assert ended == [-signal.SIGKILL, -signal.SIGKILL]


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot write .*gone"):
        run(WAITS, folder=tmp_path / "gone")


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
