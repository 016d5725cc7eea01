"""Passes that were recorded: their names, their timelines, and when there are none."""

from __future__ import annotations

import pytest
import torch

from ds_finepage.graph.memgraph import LANE_OF, NodeKind
from ds_finepage.graph.taskgraph import Buffer, BufferKind, GraphInput, TaskGraph, TensorView
from ds_finepage.planning.simulator import simulate
from ds_finepage.runtime.observing import name_of
from tests.unit.runtime.test_handle import Rig, paged, rig

__all__ = ["rig"]


@pytest.fixture
def recorded(rig: Rig) -> Rig:
    """A rig under the least budget that has recorded a pass."""
    paged(rig)
    rig.handle.record()
    assert rig.same()
    return rig


def test_nothing_is_recorded_unless_asked_for(rig: Rig) -> None:
    paged(rig)
    assert rig.same() and rig.handle.observed() == []


def test_a_recorded_pass_is_predicted_and_measured(recorded: Rig) -> None:
    (found,) = recorded.handle.observed()
    ((memgraph, predicted),) = recorded.handle.plans()
    assert (found.name, found.memgraph, found.predicted) == ("pass", memgraph, predicted)
    assert found.measured is not None
    planned = [n.id for n in memgraph.nodes if n.kind in LANE_OF]
    assert [s.node for s in found.measured.spans] == planned
    assert all(s.name for s in found.measured.spans)
    assert [(s.node, s.lane, s.name) for s in found.measured.spans] == [
        (s.node, s.lane, s.name) for s in predicted.spans
    ]
    assert found.measured.peak_bytes <= memgraph.arena_bytes


def test_timelines_begin_with_the_call(recorded: Rig) -> None:
    """The host's time before the lanes is predicted by the median of the runs so far."""
    (first,) = recorded.handle.observed()
    for _ in range(3):
        assert recorded.same()
    (found,) = recorded.handle.observed()
    assert first.measured is not None and found.measured is not None
    runner = recorded.handle._runner
    begins = runner.observer._passes[runner.table.passes[0]].begins_ns
    assert len(begins) == 3 and min(begins) > 0
    predicted_ns = sorted(begins)[1]
    assert found.measured.spans[0].start_ns >= begins[2]
    start_ns = first.predicted.spans[0].start_ns
    assert abs(found.predicted.spans[0].start_ns - start_ns - predicted_ns) <= 1
    assert found.predicted.compute_ns == first.predicted.compute_ns


def test_a_first_run_is_predicted_with_the_reloads_of_its_entry(rig: Rig) -> None:
    assert rig.same()
    stats = rig.handle.stats
    rig.handle.record()
    rig.handle.replan(budget_bytes=(stats.min_budget_bytes + stats.needed_budget_bytes) // 2)
    assert rig.same()
    (found,) = rig.handle.observed()
    assert found.measured is not None
    entry = {r.buffer for r in found.memgraph.entry}
    assert entry
    for timeline in (found.predicted, found.measured):
        nodes = [found.memgraph.nodes[s.node] for s in timeline.spans]
        assert {n.buffer for n in nodes if n.kind is NodeKind.RESIDENT} == entry
    wanted = simulate(found.memgraph, rig.handle.profile, entry_missing=entry)
    assert found.predicted == wanted


def test_recording_stops_and_keeps_what_it_has(recorded: Rig) -> None:
    before = recorded.handle.observed()
    recorded.handle.record(False)
    assert recorded.same()
    assert recorded.handle.observed() == before
    executor = recorded.handle._runner.table.passes[0].executor
    assert getattr(executor, "recorder", "absent") is None
    recorded.handle.record()
    assert recorded.handle.observed() == []


def test_another_budget_begins_a_new_list(recorded: Rig) -> None:
    assert recorded.handle.observed()
    recorded.handle.replan(budget_bytes=1 << 30)
    assert recorded.handle.observed() == []
    assert recorded.same()  # with every weight on the device
    assert recorded.handle.observed() == []


def test_a_run_that_fails_is_not_observed(recorded: Rig) -> None:
    def stop(task: object, operands: object) -> None:
        raise ValueError("stop")

    recorded.handle.register_op_hook(before=stop)
    with pytest.raises(ValueError, match="stop"):
        recorded.same()
    assert recorded.handle.observed() == []


@pytest.mark.parametrize("rig", [{"split": False}], indirect=True)
def test_passes_of_one_kind_have_different_names(rig: Rig) -> None:
    paged(rig)
    rig.handle.record()
    rig.handle.replan(budget_bytes=rig.handle.stats.min_budget_bytes + (1 << 12))
    assert rig.same()
    with torch.no_grad():
        rig.model(torch.randn(2, 3, 64))
    assert [p.name for p in rig.handle.observed()] == ["pass", "pass_2"]


@pytest.mark.parametrize(
    ("shapes", "dtype", "name"),
    [
        ([(2, 5)], "int64", "prefill"),
        ([(2, 5), (2, 1)], "int64", "decode"),  # a mask, and one token
        ([(1, 1)], "int32", "decode"),
        ([(2, 5)], "float32", "pass"),
        ([(5,)], "int64", "pass"),
        ([], "int64", "pass"),
    ],
)
def test_a_pass_is_named_by_the_tokens_that_it_reads(
    shapes: list[tuple[int, ...]], dtype: str, name: str
) -> None:
    buffers = tuple(Buffer(i, BufferKind.INPUT, 8) for i in range(len(shapes)))
    tensors = tuple(
        TensorView(i, i, dtype, shape, tuple(1 for _ in shape)) for i, shape in enumerate(shapes)
    )
    inputs = tuple(GraphInput(i, i) for i in range(len(shapes)))
    assert name_of(TaskGraph("g", buffers, tensors, (), inputs)) == name
