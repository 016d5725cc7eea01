"""Lanes of the product that omit an edge."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ds_finepage.execution import lanes as lanes_module
from ds_finepage.execution.device import Accelerator
from ds_finepage.execution.lanes import StreamLanes
from ds_finepage.execution.program import Program
from ds_finepage.graph.memgraph import Lane


def lanes_without(text: str, *, of: str | None = None) -> Callable[[Accelerator], StreamLanes]:
    """Return a maker of the product's lanes, but with one line of their source gone.

    Args:
        text: The line.
        of: The stream for which it is gone; None means all.
    """
    source = inspect.getsource(lanes_module)
    assert source.count(text) == 1, f"{text!r} occurs {source.count(text)} times; name another text"
    module = types.ModuleType("lanes_without_a_line")
    instead = "pass" if of is None else f"stream is {of} or {text}"
    exec(compile(source.replace(text, instead), module.__name__, "exec"), vars(module))
    made: Callable[[Accelerator], StreamLanes] = module.StreamLanes
    return made


def lanes_without_waits(of: Lane, on: Lane) -> Callable[[Accelerator], StreamLanes]:
    """Return a maker of lanes that omit the waits of one lane for another."""

    class Omitting(StreamLanes):
        def run(self, program: Program, actions: Any) -> None:
            if program not in self._programs:
                self._programs[program] = omitted(program)
            super().run(self._programs[program], actions)

        _programs: dict[Program, Program]

    def omitted(program: Program) -> Program:
        steps = tuple(
            replace(s, waits=tuple(w for w in s.waits if (s.lane, w[0]) != (of, on)))
            for s in program.merged
        )
        assert steps != program.merged, "the scenario has no such wait"
        by_lane = {lane: tuple(s for s in steps if s.lane is lane) for lane in Lane}
        return Program(by_lane, steps)

    def make(device: Accelerator) -> StreamLanes:
        made = Omitting(device)
        made._programs = {}
        return made

    return make
