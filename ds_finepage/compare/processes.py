"""Starts processes for commands. An error or an interrupt ends them.

[Note: no process is left]
Each process leads a group of its own, so an interrupt from a terminal reaches the command alone,
which then ends them. Where the command itself ends before it can do that, ``leash.py`` ends them.
Ranks are started by torch's own launcher, which ends all of them if one fails or it is ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ds_finepage.compare import leash
from ds_finepage.errors import ConfigError
from ds_finepage.files import read_file
from ds_finepage.integrations.deepspeed.one_process import GLOO_ALONE
from ds_finepage.units import require_count

GRACE_S = 60.0
"""Time for a process that is asked to end; the launcher of ranks ends those first."""


def environment() -> dict[str, str]:
    """Return the environment of every process.

    Half of the cores compute; the others serve the transfer lanes. Sums, and so the tokens, depend
    on the number of threads, so every run has the same. Nothing is kept from one run to the next,
    so that the first token costs what it costs on a fresh machine.
    """
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    forced = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {"OMP_NUM_THREADS": threads, **os.environ, **forced}


def run_process(arguments: Sequence[str | Path], log: Path, *, num_ranks: int = 1) -> int:
    """Run a Python process to its end, with its output in a log; return its status.

    Args:
        arguments: Python's arguments; "-m" and a module are the first ones of ranks.
        log: The file.
        num_ranks: Processes that work together. They know their rank by their variables.

    Raises:
        ConfigError: The log cannot be written.
        KeyboardInterrupt: The user has interrupted it; the process is dead by then.
    """
    try:
        stream = log.open("wb")
    except OSError as error:
        raise ConfigError(f"cannot write {log}: {error}") from error
    tied = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), sys.executable]
    variables = environment()
    if num_ranks > 1:
        tied += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        variables[GLOO_ALONE] = "1"
    with stream:
        process = subprocess.Popen(
            [*tied, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
        try:
            return process.wait()
        finally:
            end(process)


def end(process: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
    """End a process that leads a group, with its whole group, if it is still there."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            with suppress(ProcessLookupError):  # it ends just now
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)


def last_line(log: Path) -> str:
    """Return the last line of a log."""
    lines = read_file(log).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no output"


def require_ranks(num_ranks: int) -> None:
    """Refuse ranks that cannot be started on this machine.

    Args:
        num_ranks: Ranks; one can always be started.

    Raises:
        ConfigError: There is less than one rank, no device for each, or nothing that they could
            talk through.
    """
    require_count(num_ranks, "--ranks")
    if num_ranks == 1:
        return
    import torch

    if not torch.distributed.is_available():
        raise ConfigError("--ranks: this torch was built without torch.distributed. Write 1.")
    device = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if device is None else device.type
    backend = torch.distributed.get_default_backend_for_device(kind)
    if not torch.distributed.is_backend_available(backend):
        raise ConfigError(
            f"--ranks: ranks on {kind} talk through {backend}, and this torch was built without "
            f"it. Install a torch with {backend}, or write 1."
        )
    if device is not None and torch.accelerator.device_count() < num_ranks:
        raise ConfigError(
            f"--ranks: {num_ranks} ranks need a device each, and there are "
            f"{torch.accelerator.device_count()}. Write at most that."
        )
