"""Two threads that enqueue the steps of one pass: the caller's, and one for the disk lane.

A read holds the host until the disk has answered, so it has a thread of its own. A stream can wait
for an event only once that is recorded. So a step that waits for one of the other thread is behind
a flag, which the other thread raises behind the record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Action = Callable[[], object]

CHECK = -1
"""Stands for a look at the other thread: where it has failed, this one ends."""


class Handovers:
    """The flags of one program. Their actions have negative numbers, those of nodes do not."""

    def __init__(self) -> None:
        self.actions: dict[int, Action] = {CHECK: self.check}
        self._flags: dict[object, tuple[int, threading.Event]] = {}
        self._errors: list[BaseException] = []

    def raised(self, step: object) -> int:
        """Return the action that raises the flag of a step."""
        return self._of(step) - 1

    def waited(self, step: object) -> int:
        """Return the action that waits for the flag of a step."""
        return self._of(step)

    def _of(self, step: object) -> int:
        if step not in self._flags:
            flag, number = threading.Event(), -2 * len(self._flags) - 2

            def wait() -> None:
                flag.wait()
                self.check()

            self._flags[step] = number, flag
            self.actions |= {number: wait, number - 1: flag.set}
        return self._flags[step][0]

    def begin(self) -> None:
        """Begin a pass."""
        self._errors.clear()
        for _, flag in self._flags.values():
            flag.clear()

    def stop(self, error: BaseException) -> None:
        """End both threads at their next look."""
        self._errors.append(error)
        for _, flag in self._flags.values():
            flag.set()

    def check(self) -> None:
        """Raise the first error of either thread.

        Raises:
            BaseException: The error.
        """
        if self._errors:
            raise self._errors[0]
