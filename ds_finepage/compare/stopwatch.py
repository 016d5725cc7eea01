"""Times the forwards of a model from outside of everything that an engine does in them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ds_finepage.compare.engine import Engine
from ds_finepage.execution.device import device_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One forward of ``generate``.

    Attributes:
        wall_ns: Its time, until the device was done.
        h2d_bytes: Bytes that the engine copied to the device; None if it cannot tell.
        d2h_bytes: Bytes that it copied to the host.
    """

    wall_ns: int
    h2d_bytes: int | None
    d2h_bytes: int | None


class Stopwatch:
    """Stands around every call of an engine's model.

    Hooks of the model would stand inside of those of some engines, and Dynamo would look at them.
    So the class of the model gets another ``__call__`` for a while.

    Attributes:
        forwards: The forwards so far, in order.
    """

    def __init__(self, engine: Engine) -> None:
        """Prepare to watch the model of an engine."""
        self.forwards: list[Forward] = []
        self._engine = engine

    @contextmanager
    def watching(self) -> Iterator[Stopwatch]:
        """Watch the model inside the context."""
        model, owner = self._engine.model, type(self._engine.model)
        original, is_own = owner.__call__, "__call__" in vars(owner)

        def watched(called: Any, *args: Any, **kwargs: Any) -> Any:
            if called is not model:
                return original(called, *args, **kwargs)
            return self._time(lambda: original(called, *args, **kwargs))

        owner.__call__ = watched
        try:
            yield self
        finally:
            if is_own:
                owner.__call__ = original
            else:
                del owner.__call__

    def _time(self, call: Callable[[], Any]) -> Any:
        device = device_of(self._engine.device)
        self._engine.begin_forward()
        device.synchronize()
        start = time.perf_counter_ns()
        result = call()
        device.synchronize()
        took = time.perf_counter_ns() - start
        h2d, d2h = self._engine.copied()
        self.forwards.append(Forward(wall_ns=took, h2d_bytes=h2d, d2h_bytes=d2h))
        return result


def median_ns(forwards: Sequence[Forward]) -> int:
    """Return the median time of forwards."""
    return int(statistics.median(f.wall_ns for f in forwards))
