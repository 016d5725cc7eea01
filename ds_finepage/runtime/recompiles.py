"""Keeps Dynamo's limits away from attached models, and takes their graphs back out of its code.

Dynamo counts the graphs of a code object, for all models together. At a limit it gives that code
up: it makes no graph any more, and calls of a model run without a plan. All models of a class share
the code of ``forward``, and those of transformers share that of the decorator around it. Their
graphs stay in it when they are detached.

So each attached model may have as many graphs of a code object as it needs, beside those that are
there already. When it is detached, the code is as before Dynamo saw it. A model that is not
attached, and has graphs there, gets new ones.

While a model is attached, attention is compiled as transformers computes it in eager mode.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

from ds_finepage._compat.torch import (
    FrameAction,
    FrameExecStrategy,
    _debug_get_cache_entry_list,
    dynamo_config,
    reset_code,
    set_code_exec_strategy,
)
from ds_finepage._compat.transformers import attend_as_eager

LIMIT, TOTAL_LIMIT = "recompile_limit", "accumulated_recompile_limit"
"""Settings of Dynamo: graphs of a code object, and graphs that it was ever compiled to."""

MOST_GRAPHS = 64
"""Graphs of one code object that an attached model may have. Dynamo's own limit of 8 is too low
where each layer has a graph break. A model that is traced in each call ends there."""

NO_LIMIT = 2**31 - 1

USUAL: int = getattr(dynamo_config, LIMIT)
"""Dynamo's own limit, which each thread begins with."""

_lock = threading.RLock()  # the garbage collector may close a claim while another one is made
_claims: list[set[CodeType]] = []  # the code objects of each attached model
_left: set[CodeType] = set()  # the code objects of models that were forgotten while attached


class CodeClaim:
    """The code objects that one attached model has graphs of."""

    def __init__(self, owner: object) -> None:
        """Claim nothing yet; the claim ends with its owner, at the latest."""
        self._codes: set[CodeType] = set()
        self._given: int = getattr(dynamo_config, LIMIT)
        self._limit = max(self._given, MOST_GRAPHS)
        with _lock:
            _claims.append(self._codes)
            attend_as_eager(True)
        # The garbage collector may run while Dynamo is at work in that code, so code stays then.
        self._forget = weakref.finalize(owner, _end, self._codes)
        self._forget.atexit = False

    def within(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call in which Dynamo's limits are high. Each thread has its own limits.

        One that the user has set since stays.
        """

        def lifted(*args: Any, **kwargs: Any) -> Any:
            now = getattr(dynamo_config, LIMIT)
            limit = self._limit if now in (self._given, USUAL) else now
            with dynamo_config.patch({LIMIT: limit, TOTAL_LIMIT: NO_LIMIT}):
                return call(*args, **kwargs)

        return lifted

    def add(self, code: CodeType) -> None:
        """Add a code object; if Dynamo has given it up, it makes graphs of it again."""
        if code in self._codes:
            return
        self._codes.add(code)
        num_graphs = len(_debug_get_cache_entry_list(code))
        self._limit = max(self._limit, num_graphs + MOST_GRAPHS)
        if num_graphs >= self._given:
            makes_graphs = FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
            set_code_exec_strategy(code, makes_graphs)

    def close(self) -> None:
        """Take all graphs out of the code that no other attached model has graphs of."""
        with _lock:
            if self._forget() is None:
                return  # it has ended before
            for code in _left - set().union(*_claims):
                _left.remove(code)
                reset_code(code)


def _end(codes: set[CodeType]) -> set[CodeType]:
    """End a claim; its code stays as it is."""
    with _lock:
        at = next(i for i, claimed in enumerate(_claims) if claimed is codes)
        del _claims[at]
        attend_as_eager(bool(_claims))
        _left.update(codes)
    return codes
