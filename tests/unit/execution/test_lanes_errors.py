"""Errors and Ctrl-C in any lane: they are raised, and the lanes stay usable."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from ds_finepage.execution import lanes as lanes_module
from ds_finepage.execution.lanes import CpuLanes
from ds_finepage.execution.program import LANES
from ds_finepage.graph.memgraph import Lane
from tests.unit.execution.lane_programs import (
    Gate,
    assert_reusable,
    fail,
    logging_actions,
    open_when_run_winds_up,
    program_of,
)

pytestmark = pytest.mark.usefixtures("every_transfer_is_large")

every_lane = pytest.mark.parametrize("lane", LANES, ids=[lane.value for lane in LANES])


@every_lane
@pytest.mark.parametrize("error", [ValueError("op failed"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_in_any_lane_is_raised_and_the_lanes_stay_usable(
    lanes: CpuLanes, lane: Lane, error: BaseException
) -> None:
    """The other two lanes wait for the failing step, which will never be done."""
    others = [other.value for other in LANES if other is not lane]
    program = program_of(f"{lane.value} a", *(f"{other} w{other} <a" for other in others))
    actions, log = logging_actions(program)
    with pytest.raises(type(error)) as caught:
        lanes.run(program, actions | {0: fail(error)})
    assert caught.value is error
    assert log == []
    assert_reusable(lanes)


@pytest.mark.parametrize("of_copy", [[], [OSError("copy failed")]], ids=["right", "failed"])
def test_an_error_of_compute_is_raised_first_and_only_when_the_other_lanes_are_idle(
    lanes: CpuLanes, monkeypatch: pytest.MonkeyPatch, of_copy: list[Exception]
) -> None:
    """A copy that is under way when compute fails is finished; the copy behind it never begins."""
    began, gate, log = Gate(), Gate(), []
    open_when_run_winds_up(monkeypatch, gate)
    program = program_of("d2h a", "d2h b", "compute t")

    def copy() -> None:
        began.open()
        gate.wait()
        log.append("a")
        for error in of_copy:
            raise error

    def compute() -> None:
        began.wait()
        raise ValueError("op failed")

    with pytest.raises(ValueError, match="op failed"):
        lanes.run(program, {0: copy, 1: lambda: log.append("b"), 2: compute})
    assert log == ["a"]
    assert_reusable(lanes)


def test_ctrl_c_behind_the_last_task(lanes: CpuLanes, monkeypatch: pytest.MonkeyPatch) -> None:
    began, gate, log, presses = Gate(), Gate(), [], [1]
    open_when_run_winds_up(monkeypatch, gate)

    def interrupted(busy: list[Future[None]]) -> object:
        if presses:
            presses.pop()
            began.wait()
            raise KeyboardInterrupt
        return wait(busy)

    def copy() -> None:
        began.open()
        gate.wait()
        log.append("o")

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(lanes_module, "wait", interrupted)
        lanes.run(program_of("compute t", "d2h o <t"), {0: lambda: None, 1: copy})
    assert log == ["o"]
    assert_reusable(lanes)


def test_ctrl_c_while_the_lanes_are_being_started(
    lanes: CpuLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane that waits for compute must not wait for ever because compute never began."""
    submit, presses = ThreadPoolExecutor.submit, [1]

    def interrupted(thread: ThreadPoolExecutor, *job: Any) -> Future[None]:
        busy = submit(thread, *job)
        if presses:
            presses.pop()
            raise KeyboardInterrupt
        return busy

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    program = program_of("compute t", "h2d r <t", "d2h o <t")
    actions, log = logging_actions(program)
    with pytest.raises(KeyboardInterrupt):
        lanes.run(program, actions)
    assert log == []
    assert_reusable(lanes)


def test_waiting_for_a_lane_goes_on_through_more_interrupts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy, presses = Future[None](), [1, 1]

    def impatient(_: list[Future[None]]) -> None:
        if presses:
            presses.pop()
            raise KeyboardInterrupt
        busy.set_result(None)

    monkeypatch.setattr(lanes_module, "wait", impatient)
    lanes_module._wait_through_interrupts([busy])
    assert busy.done()
