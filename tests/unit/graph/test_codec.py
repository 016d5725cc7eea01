"""The codec: nothing is lost, and equal objects give equal bytes."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from typing import Any

import pytest

from ds_finepage.errors import InvalidPlanError
from ds_finepage.graph import codec
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import Buffer, BufferKind, Length, Ref, Task, TaskGraph, TensorView
from tests.unit.graph.examples import (
    GRAPH,
    STANDALONE,
    make_graph,
    make_large_graph,
    make_memgraph,
    make_profile,
    with_task,
)

# --- round trips -----------------------------------------------------------------------------


def typed(value: Any) -> Any:
    """A value together with its types, because 1 == 1.0 == True and 0.0 == -0.0."""
    if isinstance(value, tuple):
        return tuple(typed(v) for v in value)
    return (type(value), repr(value))


@pytest.mark.parametrize("obj", STANDALONE, ids=lambda obj: type(obj).__name__)
def test_round_trip_keeps_everything(obj: Any) -> None:
    back = codec.loads(codec.dumps(obj), type(obj))
    assert back == obj
    assert codec.dumps(back) == codec.dumps(obj)


def test_round_trip_keeps_types_inside_arguments() -> None:
    back = codec.loads(codec.dumps(GRAPH), TaskGraph)
    for task, original in zip(back.tasks, GRAPH.tasks, strict=True):
        assert typed(task.args) == typed(original.args)
        assert typed(task.kwargs) == typed(original.kwargs)


def test_round_trip_keeps_nan() -> None:
    graph = TaskGraph("nan", (), (), (Task(0, "aten.full.default", args=((math.nan,), "nan")),))
    ((value,), text) = codec.loads(codec.dumps(graph), TaskGraph).tasks[0].args
    assert math.isnan(value) and text == "nan"


def test_memgraph_round_trip() -> None:
    memgraph = make_memgraph(GRAPH)
    back = codec.loads(codec.dumps(memgraph), MemGraph)
    assert back == memgraph
    assert codec.dumps(back) == codec.dumps(memgraph)


def test_empty_graph_round_trip() -> None:
    graph = TaskGraph("", (), (), ())
    assert codec.loads(codec.dumps(graph), TaskGraph) == graph
    empty = MemGraph(graph, "none", 0, 1, (), (), (), ())
    assert codec.loads(codec.dumps(empty), MemGraph) == empty


def test_equal_objects_give_equal_bytes() -> None:
    assert codec.dumps(make_graph()) == codec.dumps(make_graph())
    profile = make_profile()
    as_integers = dataclasses.replace(profile, h2d_bytes_per_s=1_500_000_000)
    assert codec.dumps(as_integers) == codec.dumps(profile)


def test_text_is_one_line_of_json() -> None:
    text = codec.dumps(GRAPH)
    assert text.count("\n") == 1 and text.endswith("}\n")
    document = json.loads(text)
    assert list(document)[:3] == ["kind", "format", "name"]
    assert (document["kind"], document["format"]) == ("taskgraph", 5)
    assert document["tasks"][0]["args"][0] == {"ref": 0}


def test_a_file_has_the_planned_sizes_alone() -> None:
    def graph(size: int) -> TaskGraph:
        view = TensorView(0, 0, "float32", (size,), (1,))
        task = Task(0, "aten.full.default", args=((size,),))
        return TaskGraph("n", (Buffer(0, BufferKind.INPUT, size),), (view,), (task,))

    of_any_size = dataclasses.replace(graph(Length(8, "s0*2")), symbols=(("s0", 0),))
    assert codec.loads(codec.dumps(of_any_size), TaskGraph) == graph(8)
    plan = MemGraph(of_any_size, "none", 0, 1, (), (), (), ())
    assert codec.loads(codec.dumps(plan), MemGraph).graph == graph(8)
    assert codec.fingerprint(of_any_size) == codec.fingerprint(graph(8))


def test_large_graph_in_a_second() -> None:
    graph = make_large_graph()
    start = time.process_time()
    back = codec.loads(codec.dumps(graph), TaskGraph)
    # About 0.7 s by itself; the rest is for slow machines.
    assert time.process_time() - start < 3.0
    assert back == graph


# --- fingerprint -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        with_task(GRAPH, workspace_bytes=7),
        with_task(GRAPH, time_ns=None),
        dataclasses.replace(GRAPH, versions=(("torch", "2.14.0"),)),
    ],
)
def test_fingerprint_leaves_measured_costs_and_versions_out(other: TaskGraph) -> None:
    assert codec.fingerprint(other) == codec.fingerprint(GRAPH)


@pytest.mark.parametrize(
    "other",
    [
        dataclasses.replace(GRAPH, name="other"),
        with_task(GRAPH, op="aten.add.Tensor"),
        with_task(GRAPH, args=(Ref(0), 1)),
        with_task(GRAPH, args=(Ref(0), 1.0)),
        with_task(GRAPH, args=(Ref(0), True)),
        with_task(GRAPH, args=(Ref(0), "1")),
        with_task(GRAPH, flops=1),
        dataclasses.replace(GRAPH, inputs=()),
        dataclasses.replace(GRAPH, buffers=(*GRAPH.buffers, Buffer(5, BufferKind.INPUT, 1))),
    ],
)
def test_fingerprint_sees_the_rest(other: TaskGraph) -> None:
    assert codec.fingerprint(other) != codec.fingerprint(GRAPH)


def test_fingerprints_of_unequal_arguments_differ() -> None:
    values = (1, 1.0, True, "1", (1,), Ref(1))
    assert len({codec.fingerprint(with_task(GRAPH, args=(v,))) for v in values}) == len(values)


# --- what cannot be written ------------------------------------------------------------------


@pytest.mark.parametrize("value", [[1], {"a": 1}, 1j, BufferKind.WEIGHT, {1}])
def test_other_types_in_arguments_are_refused(value: Any) -> None:
    for changes in ({"args": ((value,),)}, {"kwargs": (("x", value),)}):
        with pytest.raises(InvalidPlanError, match=r"task 0 aten.mm.*cannot be written"):
            codec.dumps(with_task(GRAPH, **changes))


def test_rates_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InvalidPlanError, match="h2d_bytes_per_s: "):
        codec.dumps(dataclasses.replace(make_profile(), h2d_bytes_per_s=math.inf))


@pytest.mark.parametrize("kind", [TaskGraph, MemGraph])
def test_a_file_of_the_other_kind_is_refused(kind: Any) -> None:
    other = make_memgraph(GRAPH) if kind is TaskGraph else GRAPH
    with pytest.raises(InvalidPlanError, match=r"^kind: .*should be '(taskgraph|memgraph)'"):
        codec.loads(codec.dumps(other), kind)
