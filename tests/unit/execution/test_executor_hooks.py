"""Hooks and spans around the steps of a pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ds_finepage.execution.arena import byte_view
from ds_finepage.execution.executor import OpHook
from ds_finepage.execution.program import lower
from ds_finepage.execution.spans import SpanRecorder
from ds_finepage.graph.memgraph import Lane
from ds_finepage.graph.taskgraph import TO_HOST
from ds_finepage.planning.liveness import min_arena_bytes
from tests.unit.execution.graphs import CONSTANT, HOST, INPUT, OUTPUT, Draft
from tests.unit.execution.rig import N, Rig, deep, negated

# --- hooks -----------------------------------------------------------------------------------


def test_hooks_see_the_operands_and_the_results(rig: Callable[..., Rig]) -> None:
    graph, weights = deep(2)
    before: dict[int, list[torch.Tensor]] = {}
    after: dict[int, list[torch.Tensor]] = {}
    made = rig(
        graph,
        weights,
        hooks=[
            OpHook(
                before=lambda t, o: before.update({t.index: [x.clone() for x in o]}),
                after=lambda t, r: after.update({t.index: [x.clone() for x in r]}),
            )
        ],
    )
    x = torch.randn(N, N)
    (out,) = made(x)
    product = x @ weights["w0"]
    assert torch.equal(before[0][0], x) and torch.equal(before[0][1], weights["w0"])
    assert torch.equal(after[0][0], product)
    assert torch.equal(before[1][0], product)  # in place: before ...
    assert torch.equal(after[1][0], torch.tanh(product))  # ... and after
    assert torch.equal(after[4][0], out)
    assert [len(before[i]) for i in range(5)] == [2, 1, 2, 1, 2]


def test_hooks_are_not_called_beside_the_compute_lane(rig: Callable[..., Rig]) -> None:
    draft = Draft()
    x, y, rows = draft.tensor(INPUT, 3), draft.tensor(OUTPUT, 3), draft.tensor(HOST, 3)
    draft.task(TO_HOST, x, out=(rows,))
    draft.task("aten.neg.default", x, out=(y,))
    seen: list[str] = []
    made = rig(draft.graph((x,), (rows, y)), hooks=[OpHook(before=lambda t, o: seen.append(t.op))])
    made(torch.ones(3))
    assert seen == ["aten.neg.default"]


def test_hooks_see_constants_and_members_of_lists(rig: Callable[..., Rig]) -> None:
    draft = Draft()
    x, y = draft.tensor(INPUT, 1), draft.tensor(OUTPUT, 2)
    constant = draft.tensor(CONSTANT, 1, payload=byte_view(torch.tensor([5.0])).numpy().tobytes())
    draft.task("aten.cat.default", (x, constant), 0, out=(y,))
    seen: list[list[float]] = []
    made = rig(
        draft.graph((x,), (y,)),
        hooks=[OpHook(before=lambda t, o: seen.append([v.item() for v in o]))],
    )
    assert made(torch.tensor([4.0]))[0].tolist() == [4.0, 5.0]
    assert seen == [[4.0, 5.0]]


def test_hooks_come_in_order_around_the_task(rig: Callable[..., Rig]) -> None:
    log: list[str] = []

    def hook(name: str) -> OpHook:
        return OpHook(
            before=lambda t, o: log.append(f"before {name}"),
            after=lambda t, r: log.append(f"after {name}"),
        )

    made = rig(negated(), hooks=[hook("one"), OpHook(), hook("two")])
    made(torch.ones(3))
    assert log == ["before one", "before two", "after one", "after two"]


# --- spans -----------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [False, True])
def test_every_step_of_a_steady_pass_has_a_span(rig: Callable[..., Rig], poison: bool) -> None:
    graph, weights = deep()
    made = rig(graph, weights, arena_bytes=min_arena_bytes(graph, 64), poison=poison, delay_seed=1)
    made(torch.randn(N, N))
    made.executor.recorder = recorder = SpanRecorder(torch.device("cpu"))
    for _ in range(2):  # a pass begins with none
        made(torch.randn(N, N))
    spans = recorder.spans()
    expected = lower(made.memgraph, poison=poison).merged
    assert [(s.node, s.lane) for s in spans] == [(s.node.id, s.lane) for s in expected]
    assert {s.lane for s in spans} == {Lane.COMPUTE, Lane.H2D, Lane.D2H}
    for lane in Lane:
        times = [t for s in spans if s.lane is lane for t in (s.start_ns, s.end_ns)]
        assert times == sorted(times) and (not times or times[0] >= 0)


def test_spans_are_those_of_the_last_pass_alone(rig: Callable[..., Rig]) -> None:
    steps = lower(rig(*deep()).memgraph).merged[:2]
    recorder = SpanRecorder(torch.device("cpu"))
    for passed in (steps, steps[1:]):
        for action in recorder.begin(passed, {s.node.id: lambda: None for s in passed}).values():
            action()
    assert [s.node for s in recorder.spans()] == [steps[1].node.id]


def test_a_pass_that_reloads_its_entry_has_spans_of_that(rig: Callable[..., Rig]) -> None:
    graph, weights = deep()
    made = rig(graph, weights)
    made.executor.recorder = recorder = SpanRecorder(torch.device("cpu"))
    made(torch.randn(N, N))
    missing = {r.buffer for r in made.memgraph.entry}
    assert made.executor.entry_missing == missing != set()
    reloaded = {made.memgraph.nodes[s.node].buffer for s in recorder.spans() if s.lane is Lane.H2D}
    assert reloaded >= missing
    made(torch.randn(N, N))
    assert made.executor.entry_missing == set()
