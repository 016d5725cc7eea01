"""The lanes keep the order that the waits ask for, and overlap otherwise."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch

from ds_finepage.execution import lanes as lanes_module
from ds_finepage.execution.device import Accelerator
from ds_finepage.execution.lanes import CpuLanes, StreamLanes, delays_of, make_lanes
from ds_finepage.execution.program import LANES, Step
from ds_finepage.graph.memgraph import Lane
from tests.unit.execution.lane_programs import (
    Gate,
    fail,
    logging_actions,
    open_when_run_winds_up,
    program_of,
)

pytestmark = pytest.mark.usefixtures("every_transfer_is_large")

CPU = torch.device("cpu")
every_two_lanes = pytest.mark.parametrize(("first", "second"), [*permutations(LANES, 2)])

# --- order and overlap -----------------------------------------------------------------------


@every_two_lanes
def test_lanes_overlap_where_nothing_waits(lanes: CpuLanes, first: Lane, second: Lane) -> None:
    """Each step waits inside itself for the other one to have begun."""
    program = program_of(f"{first.value} a", f"{second.value} b")
    began = [Gate(), Gate()]

    def meet(own: int) -> Callable[[], None]:
        def action() -> None:
            began[own].open()
            began[1 - own].wait()

        return action

    lanes.run(program, {0: meet(0), 1: meet(1)})


@every_two_lanes
def test_a_step_waits_for_another_lane(lanes: CpuLanes, first: Lane, second: Lane) -> None:
    """The first step is held until the second lane has gone as far as it can."""
    program = program_of(f"{first.value} a", f"{second.value} b", f"{second.value} c <a")
    gate, log = Gate(), []

    def held() -> None:
        gate.wait()
        log.append("a")

    lanes.run(program, {0: held, 1: gate.open, 2: lambda: log.append("c")})
    assert log == ["a", "c"]


def test_small_transfers_are_made_by_the_calling_thread(
    lanes: CpuLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = program_of("h2d r1", "compute t1 <r1", "d2h o1 <t1", "compute t2 <o1")
    assert program.mean_transfer_bytes == 0  # its nodes have no extents
    monkeypatch.setattr(lanes_module, "SMALL_TRANSFER_BYTES", 1)
    found: list[tuple[int, int]] = []
    nodes = [s.node.id for s in program.merged]
    lanes.run(program, {n: lambda n=n: found.append((n, threading.get_ident())) for n in nodes})
    assert found == [(n, threading.get_ident()) for n in nodes]


def test_transfers_build_no_autograd_graph(lanes: CpuLanes) -> None:
    found = []
    with torch.enable_grad():
        lanes.run(program_of("h2d r"), {0: lambda: found.append(torch.is_grad_enabled())})
    assert found == [False]


# --- random delays ---------------------------------------------------------------------------


def random_lines(draw: random.Random, num_steps: int) -> list[str]:
    lines: list[str] = []
    lane_of: list[str] = []
    for i in range(num_steps):
        lane = draw.choice(LANES).value
        others = [j for j in range(max(0, i - 6), i) if lane_of[j] != lane]
        waits = draw.sample(others, min(len(others), draw.randint(0, 2)))
        lines.append(" ".join([lane, f"s{i}", *(f"<s{j}" for j in waits)]))
        lane_of.append(lane)
    return lines


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_keep_their_order_with_delays_on(seed: int) -> None:
    """Steps pass tokens on without a lock; whoever comes too early finds the wrong one."""
    program = program_of(*random_lines(random.Random(seed), 60))
    at = {(s.lane, s.position): s.node.id for s in program.merged}
    done = [False] * len(program.merged)
    early: list[int] = []

    def act(step: Step) -> Callable[[], None]:
        before = [at[wait] for wait in step.waits]
        if step.position > 1:
            before.append(at[step.lane, step.position - 1])

        def action() -> None:
            if not all(done[b] for b in before):
                early.append(step.node.id)
            done[step.node.id] = True

        return action

    lanes = CpuLanes(delays_of(seed, 50))
    for _ in range(2):
        done[:] = [False] * len(done)
        lanes.run(program, {s.node.id: act(s) for s in program.merged})
        assert early == [] and all(done)
    lanes.close()


def test_delays_come_at_seams_of_every_lane_and_keep_their_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[tuple[str, float]] = []
    monkeypatch.setattr(
        lanes_module.time,
        "sleep",
        lambda seconds: slept.append((threading.current_thread().name, seconds)),
    )
    program = program_of(*(f"{lane.value} s{lane.value}{i}" for lane in LANES for i in range(200)))
    lanes = CpuLanes(delays_of(1, 70))
    lanes.run(program, logging_actions(program)[0])
    lanes.close()
    others = {f"finepage-{name}_0" for name in ("h2d", "d2h", "ranks", "disk", "host")}
    assert {name for name, _ in slept} == others | {threading.current_thread().name}
    assert all(0 <= seconds <= 70e-6 for _, seconds in slept)
    assert 0 < len(slept) < 1200


def test_lanes_compute_with_the_threads_of_the_caller(lanes: CpuLanes) -> None:
    program = program_of("compute t", "host p <t")
    before, seen = torch.get_num_threads(), list[int]()
    try:
        for num_threads in (1, 2, 1):
            torch.set_num_threads(num_threads)
            lanes.run(program, dict.fromkeys((0, 1), lambda: seen.append(torch.get_num_threads())))
    finally:
        torch.set_num_threads(before)
    assert seen == [1, 1, 2, 2, 1, 1]


# --- ends ------------------------------------------------------------------------------------


def threads_of(lanes: CpuLanes) -> list[threading.Thread]:
    """Run a pass, and return the threads of its transfers."""
    found: list[threading.Thread] = []
    actions = dict.fromkeys((0, 1), lambda: found.append(threading.current_thread()))
    lanes.run(program_of("h2d r", "d2h o"), actions)
    return found


def test_close_ends_the_threads() -> None:
    lanes = CpuLanes()
    threads = threads_of(lanes)
    assert {*threads} == {*threads_of(lanes)} and len(threads) == 2
    assert all(t.is_alive() for t in threads)
    for _ in range(2):
        lanes.close()
    assert not any(t.is_alive() for t in threads)


def test_threads_that_are_gone_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was forked has the objects of its parent, and no thread of them."""
    lanes = CpuLanes()
    of_parent = threads_of(lanes)
    monkeypatch.setattr(lanes_module.os, "getpid", lambda: -1)
    assert {*threads_of(lanes)}.isdisjoint(of_parent)
    lanes.close()


def test_the_device_decides_the_lanes() -> None:
    lanes = make_lanes(CPU, delay_seed=3, max_delay_us=7)
    assert isinstance(lanes, CpuLanes)
    assert lanes._delays is not None and 6 < max(lanes._delays() for _ in range(1000)) <= 7
    lanes.close()


# --- streams ---------------------------------------------------------------------------------


class PaperStream:
    """A stream that notes what is enqueued on it."""

    def __init__(self, log: list[tuple[str, Any]], name: str) -> None:
        self._log, self._name = log, name

    def __enter__(self) -> None:
        self._log.append(("enter", self._name))

    def __exit__(self, *error: object) -> None:
        self._log.append(("exit", self._name))

    def wait_event(self, event: Any) -> None:
        self._log.append(("wait", self._name))

    def wait_stream(self, stream: PaperStream) -> None:
        self._log.append(("join", stream._name))

    def record_event(self, event: Any) -> None:
        self._log.append(("record", self._name))


class PaperAccelerator(Accelerator):
    """A device that only notes; ``log`` has what was asked of it, in order."""

    def __init__(self, *, can_delay: bool = True) -> None:
        super().__init__(torch.device("cuda"))
        self.log: list[tuple[str, Any]] = []
        self.num_events = 0
        self._names = iter(("h2d", "d2h", "ranks", "disk", "host"))
        self._current = PaperStream(self.log, "compute")
        self._can_delay = can_delay

    @property
    def name(self) -> str:
        return "paper"

    @property
    def can_delay(self) -> bool:
        return self._can_delay

    def new_stream(self) -> Any:
        return PaperStream(self.log, next(self._names))

    def current_stream(self) -> Any:
        return self._current

    def new_event(self, *, is_timed: bool = False) -> Any:
        self.num_events += 1
        return object()

    def synchronize(self) -> None:
        self.log.append(("synchronize", None))

    def delay(self, stream: Any, delay_us: float) -> None:
        if delay_us:
            self.log.append((f"delay {stream._name}", delay_us))


def test_events_go_with_their_program() -> None:
    """A pass that finds other weights in the arena has a program of its own, for one run."""
    device = PaperAccelerator()
    lanes, program = StreamLanes(device), program_of("h2d r", "compute t <r")
    own = device.num_events
    for _ in range(2):
        lanes.run(program, logging_actions(program)[0])
        assert device.num_events == own + 1  # of the step that another one waits for
    del program
    gc.collect()
    assert len(lanes._order) == 0


def test_steps_of_a_lane_in_a_row_enter_its_stream_once() -> None:
    device = PaperAccelerator()
    program = program_of("h2d a", "h2d b", "compute t <b", "h2d c")
    actions, order = logging_actions(program)
    lanes = StreamLanes(device)
    lanes.run(program, actions)
    assert order == [0, 1, 2, 3]
    assert device.log == [
        ("record", "compute"),
        ("wait", "h2d"),
        ("enter", "h2d"),
        ("record", "h2d"),
        ("exit", "h2d"),
        ("wait", "compute"),
        ("enter", "h2d"),
        ("exit", "h2d"),
        ("join", "h2d"),
        ("record", "compute"),
    ]  # nothing on d2h, which has no step, and the host waits for nothing
    lanes.close()
    assert device.log[-1] == ("synchronize", None)


@pytest.mark.parametrize("where", ["action", "join"])
def test_after_an_error_the_host_waits_for_the_device(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after Ctrl-C when every step is enqueued, and the caller's stream has not joined."""
    device = PaperAccelerator()
    lanes, program = StreamLanes(device), program_of("h2d r", "compute t <r")
    actions, _ = logging_actions(program)
    if where == "action":
        actions[1] = fail(KeyboardInterrupt())
    else:

        def interrupted(stream: Any, other: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(PaperStream, "wait_stream", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lanes.run(program, actions)
    assert device.log[-1] == ("synchronize", None)


def test_another_stream_of_the_caller_follows_the_last_pass() -> None:
    device = PaperAccelerator()
    lanes, program = StreamLanes(device), program_of("h2d r", "compute t <r")
    lanes.follow()
    assert device.log == []
    lanes.run(program, logging_actions(program)[0])
    device.log.clear()
    device._current = PaperStream(device.log, "other")
    lanes.follow()
    assert device.log == [("wait", "other")]


def test_delays_come_on_the_device_on_every_lane_and_keep_their_limit() -> None:
    device = PaperAccelerator()
    program = program_of(*(f"{lane.value} s{lane.value}{i}" for lane in LANES for i in range(200)))
    lanes = StreamLanes(device, delays_of(1, 70))
    lanes.run(program, logging_actions(program)[0])
    found = [(what, us) for what, us in device.log if what.startswith("delay")]
    assert {what for what, _ in found} == {f"delay {lane.value}" for lane in LANES}
    assert all(0 < us <= 70 for _, us in found) and len(found) < 200


@pytest.mark.parametrize("repeat", range(20))
def test_reads_and_the_other_lanes_wait_for_each_other(repeat: int) -> None:
    """On each side a stream waits only for events that the other thread has recorded."""
    device = PaperAccelerator()
    lines = ["disk r1", "compute t1 <r1", "disk r2 <t1", "h2d c", "compute t2 <r2 <c", "disk r3"]
    program = program_of(*lines)
    lanes = StreamLanes(device)
    for _ in range(2):
        actions, log = logging_actions(program)
        lanes.run(program, actions)
        assert sorted(log) == [*range(6)]
        at = {node: i for i, node in enumerate(log)}
        assert at[0] < at[1] < at[2] < at[4] and at[3] < at[4] and at[2] < at[5]
    assert ("join", "disk") in device.log
    lanes.close()


@pytest.mark.parametrize("failing", range(3))
def test_an_error_on_either_side_ends_both(failing: int) -> None:
    device = PaperAccelerator()
    program = program_of("disk r1", "compute t1 <r1", "disk r2 <t1", "compute t2 <r2", "disk r3")
    lanes = StreamLanes(device)
    actions, log = logging_actions(program)
    actions[failing] = fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        lanes.run(program, actions)
    assert log == [*range(failing)]
    assert device.log[-1] == ("synchronize", None)
    actions, log = logging_actions(program)  # the next pass is as if nothing had been
    lanes.run(program, actions)
    assert sorted(log) == [*range(5)]
    lanes.close()


def test_after_an_error_no_other_read_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, program = StreamLanes(PaperAccelerator()), program_of("disk r1", "disk r2", "compute t")
    actions, log = logging_actions(program)
    gate = Gate()
    open_when_run_winds_up(monkeypatch, gate)
    actions[0], actions[2] = gate.wait, fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        lanes.run(program, actions)
    assert log == []
    lanes.close()


def test_an_error_of_the_last_read_is_raised() -> None:
    lanes, program = StreamLanes(PaperAccelerator()), program_of("compute t", "disk r")
    actions, _ = logging_actions(program)
    actions[1] = fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        lanes.run(program, actions)
    lanes.close()


def test_the_thread_of_the_disk_ends_with_the_lanes() -> None:
    lanes, program = StreamLanes(PaperAccelerator()), program_of("disk r")
    found: list[threading.Thread] = []
    for _ in range(2):
        lanes.run(program, {0: lambda: found.append(threading.current_thread())})
    assert found[0] is found[1] is not threading.current_thread()
    lanes.close()
    assert not found[0].is_alive()


def test_a_device_that_cannot_be_delayed_is_named(caplog: pytest.LogCaptureFixture) -> None:
    device = PaperAccelerator(can_delay=False)
    lanes, program = StreamLanes(device, delays_of(1, 70)), program_of(*["compute t"] * 50)
    assert "lane_delay_seed has no effect: torch cannot delay paper" in caplog.text
    lanes.run(program, logging_actions(program)[0])
    assert not [what for what, _ in device.log if what.startswith("delay")]


def test_threads_end_with_lanes_that_nobody_closed() -> None:
    lanes = CpuLanes()
    threads = threads_of(lanes)
    del lanes
    gc.collect()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
