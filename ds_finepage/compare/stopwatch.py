"""Times the forwards of a model from outside of everything that an engine does in them."""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Iterator, Sequence
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
        h2d_bytes: Bytes that the engine copied to the device.
        d2h_bytes: Bytes that it copied to the host.
    """

    wall_ns: int
    h2d_bytes: int
    d2h_bytes: int


@contextmanager
def timed_forwards(engine: Engine) -> Iterator[list[Forward]]:
    """Time every call of an engine's model inside the context; yield the list that they come into.

    Hooks of the model would stand inside of those of some engines, and Dynamo would look at them.
    So the class of the model gets another ``__call__`` for a while.
    """
    model, owner, device = engine.model, type(engine.model), device_of(engine.device)
    original, is_own = owner.__call__, "__call__" in vars(owner)
    forwards: list[Forward] = []

    def timed(called: Any, *args: Any, **kwargs: Any) -> Any:
        if called is not model:
            return original(called, *args, **kwargs)
        before = engine.copied()
        device.synchronize()
        start = time.perf_counter_ns()
        result = original(called, *args, **kwargs)
        device.synchronize()
        took = time.perf_counter_ns() - start
        h2d, d2h = map(operator.sub, engine.copied(), before)
        forwards.append(Forward(wall_ns=took, h2d_bytes=h2d, d2h_bytes=d2h))
        return result

    owner.__call__ = timed
    try:
        yield forwards
    finally:
        if is_own:
            owner.__call__ = original
        else:
            del owner.__call__


def a_token(forwards: Sequence[Forward], wall_ns: int, new_tokens: int) -> Forward:
    """Return what a token behind the first one takes, where a forward may yield several.

    Args:
        forwards: Those of a call of ``generate``.
        wall_ns: The time of the call, with the steps of a draft.
        new_tokens: The tokens of the call.
    """
    num_tokens = max(1, new_tokens - 1)
    return Forward(
        wall_ns=(wall_ns - forwards[0].wall_ns) // num_tokens,
        h2d_bytes=sum(forward.h2d_bytes for forward in forwards[1:]) // num_tokens,
        d2h_bytes=sum(forward.d2h_bytes for forward in forwards[1:]) // num_tokens,
    )


def median_ns(forwards: Sequence[Forward]) -> int:
    """Return the median time of forwards."""
    return int(statistics.median(f.wall_ns for f in forwards))
