"""Programs for the lanes, written by hand, and gates that force an order.

A gate that never opens ends its test with an error, by its timeout.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from ds_finepage.execution import lanes as lanes_module
from ds_finepage.execution.lanes import CpuLanes
from ds_finepage.execution.program import LANES, Program, Step
from ds_finepage.graph.memgraph import Lane, Node, NodeKind


def program_of(*lines: str) -> Program:
    """Build a program of lines such as ``"h2d r1 <t1 <o1"``; node ids count the lines."""
    at: dict[str, tuple[Lane, int]] = {}
    drafts = []
    for i, line in enumerate(lines):
        lane_name, name, *before = line.replace("<", "").split()
        lane = Lane(lane_name)
        position = 1 + sum(other is lane for other, _ in at.values())
        at[name] = (lane, position)
        drafts.append((i, lane, position, tuple(at[b] for b in before)))
    waited = {wait for *_, waits in drafts for wait in waits}
    merged = tuple(
        Step(Node(i, NodeKind.COMPUTE, task=i), lane, position, waits, (lane, position) in waited)
        for i, lane, position, waits in drafts
    )
    return Program({lane: tuple(s for s in merged if s.lane is lane) for lane in LANES}, merged)


class Gate:
    """An event that is waited for with a limit."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.open = self._event.set

    def wait(self) -> None:
        assert self._event.wait(20), "a gate was never opened"


def logging_actions(program: Program) -> tuple[dict[int, Callable[[], None]], list[int]]:
    log: list[int] = []
    return {s.node.id: lambda i=s.node.id: log.append(i) for s in program.merged}, log  # type: ignore[misc]


def open_when_run_winds_up(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    """Open a gate once a run has seen an error and waits for its lanes."""
    wait = lanes_module._wait_through_interrupts

    def wind_up(busy: list[Future[None]]) -> None:
        gate.open()
        wait(busy)

    monkeypatch.setattr(lanes_module, "_wait_through_interrupts", wind_up)


def fail(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


def assert_reusable(lanes: CpuLanes) -> None:
    """A program that goes through all lanes and back runs as if nothing had been before."""
    program = program_of("h2d r", "compute t <r", "d2h o <t", "compute u <o", "h2d q <u")
    actions, log = logging_actions(program)
    lanes.run(program, actions)
    assert log == [0, 1, 2, 3, 4]
