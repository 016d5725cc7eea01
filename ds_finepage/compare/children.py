"""The processes that a command has started. They end together, and none outlives the command.

[Note: no process is left]
Each process leads a group of its own, so an interrupt from a terminal reaches the command alone,
which then ends them. One that comes while a process starts waits until that one is known. Threads
of the command that wait for a process hear of no interrupt; the main thread ends their processes
for them. Where the command itself is killed, ``leash.py`` ends them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from ds_finepage.compare import leash
from ds_finepage.errors import ConfigError, FinepageError


class Children:
    """The processes of a command; see [Note: no process is left].

    Invariant: none runs after :meth:`end`, and none starts.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._lock = threading.Lock()
        self._running: list[subprocess.Popen[bytes]] = []
        self._is_over = False

    @contextmanager
    def started(
        self,
        arguments: Sequence[str | Path],
        log: BinaryIO,
        variables: Mapping[str, str],
        folder: Path | None = None,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Yield a new Python process; it is dead afterwards.

        Args:
            arguments: Python's arguments.
            log: Gets the output.
            variables: The environment.
            folder: Where it runs; None is the folder of this process.

        Raises:
            FinepageError: All have been ended.
        """
        tied = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), sys.executable]
        release = hold_interrupts()
        try:
            with self._lock:
                if self._is_over:
                    raise FinepageError("the command ends, and starts no more processes.")
                process = subprocess.Popen(
                    [*tied, *arguments],
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=variables,
                    start_new_session=True,
                )
                self._running.append(process)
        except BaseException:
            release()
            raise
        try:
            release()
            yield process
        finally:
            kill(process)
            self._running.remove(process)

    def end(self) -> None:
        """End all processes."""
        with self._lock:
            self._is_over = True
        for process in tuple(self._running):
            kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process that leads a group, with its whole group, if it is still there."""
    if process.poll() is None:
        with suppress(ProcessLookupError):  # it ends just now
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def hold_interrupts() -> Callable[[], None]:
    """Hold SIGINT and SIGTERM back until the result is called; only the main thread hears them."""
    handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}
    heard: list[int] = []
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if callable(handler):  # else Python does nothing, or the process ends at once
                handlers[number] = handler
                signal.signal(number, lambda number, _: heard.append(number))

    def release() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for heard_number in heard:
            signal.raise_signal(heard_number)

    return release


def opened(log: Path) -> BinaryIO:
    """Open a log.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        return log.open("wb")
    except OSError as error:
        raise ConfigError(f"cannot write {log}: {error}") from error
