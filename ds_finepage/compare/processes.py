"""Starts processes for commands: one, or one a rank. An error or an interrupt ends them all.

[Note: ranks that meet]
Ranks find each other in a store. This process holds it, at a port that is free, so two commands
never meet, and no rank waits for rank 0 to open one. A rank that fails closes its connections, and
the others end with an error of their own. They get ``GRACE_S`` for that, and are killed then.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread

from ds_finepage.compare.children import Children, opened
from ds_finepage.errors import ConfigError, RankError
from ds_finepage.files import CACHE_VARIABLE, read_file
from ds_finepage.integrations.deepspeed.one_process import GLOO_ALONE
from ds_finepage.units import require_count

HOST = "127.0.0.1"
LIMIT_S = 1800.0
"""Time for one start of all ranks."""

GRACE_S = 20.0
"""Time for the other ranks to end where one has failed."""

ERROR = re.compile(r"(\[rank\d+\]: )?((\w+\.)*\w*(Error|Exception|Interrupt)\b.*)")
"""The last line of a traceback; torch names the rank before it."""


def environment() -> dict[str, str]:
    """Return the environment of every process.

    Half of the cores compute; the others serve the transfer lanes. Sums, and so the tokens, depend
    on the number of threads, so every run has the same. Nothing is kept from one run to the next,
    so that the first token costs what it costs on a fresh machine.
    """
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    forced = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", CACHE_VARIABLE: "0"}
    return {"OMP_NUM_THREADS": threads, **os.environ, **forced}


def run_process(
    arguments: Sequence[str | Path],
    log: Path,
    variables: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
    children: Children | None = None,
) -> int:
    """Run a Python process to its end, with its output in a log; return its status.

    Args:
        arguments: Python's arguments.
        log: The file.
        variables: Its environment; None is that of every process.
        folder: Where it runs; None is the folder of this process.
        children: The processes that it is to end with.

    Raises:
        ConfigError: The log cannot be written.
        KeyboardInterrupt: The user has interrupted it; the process is dead by then.
    """
    children = children or Children()
    with (
        opened(log) as stream,
        children.started(arguments, stream, variables or environment(), folder) as process,
    ):
        return process.wait()


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


def run_ranks(
    commands: Sequence[Sequence[str | Path]],
    logs: Sequence[Path],
    variables: Mapping[str, str],
    *,
    limit_s: float = LIMIT_S,
    grace_s: float = GRACE_S,
    children: Children | None = None,
) -> None:
    """Run a Python process for each rank to its end; see [Note: ranks that meet].

    Args:
        commands: Python's arguments for each rank.
        logs: A file for the output of each rank.
        variables: The environment of every rank; what tells one from another is added.
        limit_s: Seconds until all ranks have to be done.
        grace_s: Seconds for the others where a rank has failed.
        children: The processes that the ranks are to end with.

    Raises:
        ConfigError: A log cannot be written.
        RankError: A rank failed, or the ranks took too long. No rank runs by then.
    """
    children = children or Children()
    with ExitStack() as stack:
        meeting = stack.enter_context(meeting_place(len(commands)))
        ended: SimpleQueue[int] = SimpleQueue()
        ranks: list[subprocess.Popen[bytes]] = []
        for rank, (command, log) in enumerate(zip(commands, logs, strict=True)):
            stream = stack.enter_context(opened(log))
            own = {**variables, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = stack.enter_context(children.started(command, stream, own))
            ranks.append(process)
            Thread(target=_wait, args=(process, rank, ended), daemon=True).start()
        failed = _first_failure(ranks, ended, time.monotonic() + limit_s, grace_s)
    if failed is not None:
        raise RankError(_reason(failed, ranks[failed].returncode, logs[failed]))
    late = [rank for rank, process in enumerate(ranks) if process.returncode]
    if late:
        raise RankError(
            f"ranks {', '.join(map(str, late))} of {len(ranks)} were not done after {limit_s:.0f} "
            f"s, and are ended. The last line of rank {late[0]}: {last_line(logs[late[0]])}"
        )


def _wait(process: subprocess.Popen[bytes], rank: int, ended: SimpleQueue[int]) -> None:
    process.wait()
    ended.put(rank)


def _first_failure(
    ranks: Sequence[subprocess.Popen[bytes]],
    ended: SimpleQueue[int],
    until: float,
    grace_s: float,
) -> int | None:
    """Wait until all ranks have ended, or time is over; return the first one that failed."""
    failed: int | None = None
    for _ in ranks:
        try:
            rank = ended.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            return failed
        if ranks[rank].returncode and failed is None:
            failed, until = rank, min(until, time.monotonic() + grace_s)
    return failed


def _reason(rank: int, status: int, log: Path) -> str:
    lines = read_file(log).decode(errors="replace").splitlines()
    errors = [found[2] for line in lines if (found := ERROR.fullmatch(line.strip()))]
    return f"rank {rank} ended with status {status}: {(errors or [last_line(log)])[-1]}"


@contextmanager
def meeting_place(num_ranks: int) -> Iterator[dict[str, str]]:
    """Hold the store where ranks of this machine meet; yield the variables that lead there."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not say so

    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    yield {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there, as under torchrun
        GLOO_ALONE: "1",
    }
    del store
