"""Recorded runs: the tasks that join, when they are recorded, and what a failure leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from ds_finepage.execution import replay as replay_module
from ds_finepage.execution.device import Accelerator
from ds_finepage.execution.executor import OpHook
from ds_finepage.execution.lanes import Action
from ds_finepage.execution.ops import bind
from ds_finepage.execution.program import Program, lower
from ds_finepage.execution.replay import Graphs, can_be_recorded, joined
from ds_finepage.execution.spans import SpanRecorder
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.taskgraph import TO_HOST, TaskGraph
from tests.unit.execution.graphs import ACTIVATION, INPUT, OUTPUT, Draft
from tests.unit.execution.lane_programs import fail, logging_actions, program_of
from tests.unit.execution.rig import Rig, deep, deep_in_eager

# --- runs ------------------------------------------------------------------------------------


def runs_of(program: Program, *apart: int) -> list[tuple[int, ...]]:
    """Return the runs of a program where every node but ``apart`` can be recorded."""
    ids = {s.node.id for s in program.lanes[Lane.COMPUTE]}
    return joined(program, ids - set(apart))[1]


def test_tasks_that_follow_one_another_are_one_run() -> None:
    program = program_of("compute a", "h2d r", "compute b", "compute c")
    found, runs = joined(program, {0, 2, 3})
    assert runs == [(0, 2, 3)]
    assert [s.node.id for s in found.merged] == [0, 1]
    assert [s.node.id for s in found.lanes[Lane.COMPUTE]] == [0]
    assert [s.node.id for s in found.lanes[Lane.H2D]] == [1]


def test_a_task_that_waits_begins_a_run() -> None:
    program = program_of("h2d r", "compute a", "compute b", "compute c <r", "compute d")
    found, runs = joined(program, {1, 2, 3, 4})
    assert runs == [(1, 2), (3, 4)]
    (wait,) = (s.waits for s in found.merged if s.node.id == 3)
    assert wait == ((Lane.H2D, 1),)


def test_a_task_that_another_lane_waits_for_ends_a_run() -> None:
    program = program_of("compute a", "compute b", "h2d r <b", "compute c", "compute d")
    found, runs = joined(program, {0, 1, 3, 4})
    assert runs == [(0, 1), (3, 4)]
    first, reload, _ = found.merged
    assert first.signals and (Lane.COMPUTE, first.position) in reload.waits


def test_a_task_that_cannot_be_recorded_is_apart() -> None:
    program = program_of("compute a", "compute b", "compute c", "compute d", "compute e")
    assert runs_of(program, 2) == [(0, 1), (3, 4)]
    assert runs_of(program, 1) == [(2, 3, 4)]
    assert runs_of(program, 1, 3) == []


# --- tasks -----------------------------------------------------------------------------------


def one_task(op: str, *others: Any, **kwargs: Any) -> TaskGraph:
    draft = Draft()
    x, y = draft.tensor(INPUT, 3), draft.tensor(OUTPUT, 3)
    draft.task(op, x, *others, out=(y,), **kwargs)
    return draft.graph((x,), (y,))


@pytest.mark.parametrize(
    ("op", "into_place", "workspace_bytes", "expected"),
    [
        ("aten.neg.default", True, 0, True),
        ("aten.neg.default", False, 0, False),  # its result is new memory
        ("aten.neg.default", True, 8, False),
        ("aten.clone.default", True, 0, True),
        ("aten.bernoulli_.float", True, 0, False),
        (TO_HOST, True, 0, False),
    ],
)
def test_a_task_is_recorded_if_it_runs_in_place_without_memory_of_its_own(
    op: str, into_place: bool, workspace_bytes: int, expected: bool
) -> None:
    task = replace(one_task(op).tasks[0], workspace_bytes=workspace_bytes)
    bound = bind(task, lambda _: torch.zeros(3), [], into_place=into_place)
    assert can_be_recorded(task, bound) is expected


def test_a_task_that_waits_for_the_router_is_not_recorded() -> None:
    task = one_task("aten.neg.default").tasks[0]
    bound = bind(task, lambda _: torch.zeros(3), [], into_place=True)
    bound.waits = True
    assert not can_be_recorded(task, bound)


def test_tasks_on_the_tensors_of_a_call_are_not_recorded() -> None:
    draft = Draft()
    x, y = draft.tensor(INPUT, 3), draft.tensor(OUTPUT, 3)
    a, b = draft.tensor(ACTIVATION, 3), draft.tensor(ACTIVATION, 3)
    for given, made in ((x, a), (a, b), (b, y)):
        draft.task("aten.neg.default", given, out=(made,))
    rig = Rig(draft.graph((x,), (y,)))
    tasks = {n.id: n.task for n in rig.memgraph.nodes if n.task is not None}
    assert [tasks[node] for node in sorted(rig.executor._bound.recordable)] == [1]


# --- recording -------------------------------------------------------------------------------


class FakeStream:
    """A stream that notes who is current, and what it waits for."""

    def __init__(self, device: FakeDevice, name: str) -> None:
        self._device, self.name = device, name

    def __enter__(self) -> None:
        self._device.current.append(self)

    def __exit__(self, *error: object) -> None:
        self._device.current.pop()

    def wait_stream(self, other: FakeStream) -> None:
        self._device.log.append(f"{self.name} waits for {other.name}")


class FakeDevice:
    """Records by calling later; ``refuses`` is the error of the next recordings."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = [FakeStream(self, "caller")]
        self.refuses: BaseException | None = None

    def new_stream(self) -> FakeStream:
        return FakeStream(self, "recorder")

    def current_stream(self) -> FakeStream:
        return self.current[-1]

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def record(self, work: Callable[[], object], stream: FakeStream) -> Callable[[], None]:
        if self.refuses is not None:
            raise self.refuses
        assert stream.name == "recorder"
        self.log.append("record")

        def replay() -> None:
            self.log.append("replay")
            work()

        return replay

    def enqueue(self, name: str) -> Callable[[], None]:
        return lambda: self.log.append(f"{name} on {self.current_stream().name}")


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def graphs_of(device: FakeDevice) -> Graphs:
    return Graphs(cast(Accelerator, device))


FIRST = ["recorder waits for caller", "a on recorder", "b on recorder", "caller waits for recorder"]


def run_of(graphs: Graphs, *tasks: Action) -> Action:
    """Return the action of a run of tasks."""
    program = program_of(*(f"compute t{i}" for i in range(len(tasks))))
    return graphs.replayed(program, dict(enumerate(tasks)), range(len(tasks)))[1][0]


def two_of(device: FakeDevice, graphs: Graphs) -> Action:
    return run_of(graphs, device.enqueue("a"), device.enqueue("b"))


def test_a_run_is_enqueued_where_it_is_recorded_and_replayed_then(device: FakeDevice) -> None:
    run = two_of(device, graphs_of(device))
    run()
    assert device.log == [*FIRST, "record"]
    device.log.clear()
    run()
    assert device.log == ["replay", "a on caller", "b on caller"]


def test_runs_whose_graphs_were_dropped_are_recorded_again(device: FakeDevice) -> None:
    graphs = graphs_of(device)
    run = two_of(device, graphs)
    run()
    graphs.clear()
    assert device.log[-1] == "synchronize"
    device.log.clear()
    run()
    assert device.log == [*FIRST, "record"]


def test_all_graphs_are_dropped_together_when_there_are_many(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_module, "MOST_GRAPHS", 2)
    graphs = graphs_of(device)
    runs = [two_of(device, graphs) for _ in range(3)]
    for run in runs[:2]:
        run()
    assert "synchronize" not in device.log
    runs[2]()
    assert device.log.count("synchronize") == 1
    device.log.clear()
    runs[2]()
    runs[0]()
    assert device.log == ["replay", "a on caller", "b on caller", *FIRST, "record"]


def test_a_run_that_cannot_be_recorded_is_enqueued_task_by_task(
    device: FakeDevice, caplog: pytest.LogCaptureFixture
) -> None:
    device.refuses = RuntimeError("not while capturing")
    run = two_of(device, graphs_of(device))
    with caplog.at_level(logging.WARNING):
        run()
    assert caplog.messages == [
        "2 tasks run one by one: they cannot be recorded: not while capturing"
    ]
    device.log.clear()
    run()
    assert device.log == ["a on caller", "b on caller"]


@pytest.mark.parametrize("error", (torch.OutOfMemoryError("full"), KeyboardInterrupt()))
def test_other_errors_of_a_recording_are_the_callers(
    device: FakeDevice, error: BaseException
) -> None:
    device.refuses = error
    run = two_of(device, graphs_of(device))
    with pytest.raises(type(error)):
        run()
    device.refuses = None
    run()
    run()
    assert device.log[-3:] == ["replay", "a on caller", "b on caller"]


def test_an_error_of_a_task_is_the_callers_and_nothing_is_recorded(device: FakeDevice) -> None:
    run = run_of(graphs_of(device), fail(ValueError("stop")), device.enqueue("b"))
    for _ in range(2):
        with pytest.raises(ValueError, match="stop"):
            run()
    assert "record" not in device.log and len(device.current) == 1


def test_a_replayed_pass_has_an_action_for_each_step(device: FakeDevice) -> None:
    program = program_of("h2d r", "compute a <r", "compute b", "compute c")
    actions, log = logging_actions(program)
    found, recorded = graphs_of(device).replayed(program, actions, {1, 2})
    for step in found.merged:
        recorded[step.node.id]()
    assert log == [0, 1, 2, 3]
    assert [recorded[s.node.id] != actions[s.node.id] for s in found.merged] == [False, True, False]


# --- the executor ----------------------------------------------------------------------------


def test_steady_passes_replay_and_others_do_not(device: FakeDevice) -> None:
    torch.manual_seed(0)
    graph, weights = deep()
    rig = Rig(graph, weights, graphs=graphs_of(device))
    for has_entry, num_records, num_replays in ((False, 0, 0), (True, 1, 0), (True, 0, 1)):
        x = torch.randn(8, 8)
        device.log.clear()
        assert torch.equal(rig(x)[0], deep_in_eager(x, weights))
        assert bool(rig.executor.entry_missing) is not has_entry
        assert device.log.count("record") == num_records
        assert device.log.count("replay") == num_replays


def test_a_hook_sees_each_task_of_a_run(device: FakeDevice) -> None:
    graph, weights = deep()
    hooks: list[OpHook] = []
    rig = Rig(graph, weights, graphs=graphs_of(device), hooks=hooks)
    x = torch.randn(8, 8)
    for _ in range(3):
        rig(x)
    assert "replay" in device.log
    seen: list[int] = []
    hooks.append(OpHook(before=lambda task, _: seen.append(task.index)))
    device.log.clear()
    rig(x)
    assert seen == list(range(len(graph.tasks))) and device.log == []
    hooks.clear()
    rig(x)
    assert device.log.count("replay") == 1


def test_a_recorded_pass_has_a_span_of_each_task(device: FakeDevice) -> None:
    graph, weights = deep()
    rig = Rig(graph, weights, graphs=graphs_of(device))
    for _ in range(3):
        rig(torch.randn(8, 8))
    device.log.clear()
    rig.executor.recorder = recorder = SpanRecorder(torch.device("cpu"))
    rig(torch.randn(8, 8))
    assert device.log == []
    assert {s.node for s in recorder.spans()} == {s.node.id for s in lower(rig.memgraph).merged}
