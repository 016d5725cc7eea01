"""Ties a process to the one that starts it: it ends with that one, even where that is killed.

    python leash.py PARENT COMMAND...

PARENT is the id of the process that starts it. The program COMMAND takes the place of this one, so
it is the process that was started. Linux alone has such a tie; elsewhere COMMAND runs without.

This file is run by its path, and imports nothing that takes time.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

END_WITH_PARENT = 1
"""Linux's number of ``PR_SET_PDEATHSIG``."""


def main(arguments: list[str]) -> None:
    """Ask for the signal, and become the command."""
    parent, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGTERM)
        if os.getppid() != int(parent):  # it ended before there was a tie
            sys.exit(f"process {parent} is gone")
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
