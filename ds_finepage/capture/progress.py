"""Shows that a first call is prepared, once that takes longer than two seconds."""

from __future__ import annotations

import logging
import threading
from typing import Any

from rich.console import Console

logger = logging.getLogger(__name__)

DELAY_S = 2.0
TEXT = "ds_finepage captures and plans the first call"


class Progress:
    """A status line on stderr where that is a terminal, and a line in the log."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._status: Any = None

    def start(self) -> None:
        """Show the status in two seconds; a second call does nothing."""
        with self._lock:
            if self._timer is None:
                self._timer = threading.Timer(DELAY_S, self._show)
                self._timer.daemon = True
                self._timer.start()

    def _show(self) -> None:
        with self._lock:
            if self._timer is None:
                return  # it stopped meanwhile
            logger.info("%s", TEXT)
            console = Console(stderr=True)
            if console.is_terminal:
                self._status = console.status(TEXT)
                self._status.start()

    def stop(self) -> None:
        """Remove the status."""
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            if self._status is not None:
                self._status.stop()
            self._timer = self._status = None
