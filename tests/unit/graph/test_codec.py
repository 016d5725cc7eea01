"""The codec: nothing is lost, equal objects give equal bytes, whatever is wrong is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.errors import ConfigError, InvalidPlanError
from ds_finepage.graph import codec
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import (
    Edge,
    EdgeKind,
    Extent,
    Lane,
    MemGraph,
    Node,
    NodeKind,
    Residency,
)
from ds_finepage.graph.taskgraph import (
    Buffer,
    BufferKind,
    GraphInput,
    GraphOutput,
    ModuleCall,
    Ref,
    Symbol,
    Task,
    TaskGraph,
    TensorView,
)
from ds_finepage.graph.timeline import Span, Timeline

VERSIONS = (("torch", "2.13.0"), ("transformers", "5.23.0"))


def make_graph() -> TaskGraph:
    return TaskGraph(
        name="tiny",
        buffers=(
            Buffer(0, BufferKind.WEIGHT, 64, "layers.0.größe.weight"),
            Buffer(1, BufferKind.INPUT, 16),
            Buffer(2, BufferKind.ACTIVATION, 32),
            Buffer(3, BufferKind.CONSTANT, 4, payload=b"\x00\xff\n\x80"),
            Buffer(4, BufferKind.OUTPUT, 0, payload=b""),
        ),
        tensors=(
            TensorView(0, 0, "float32", (4, 4), (4, 1)),
            TensorView(1, 1, "int64", (2,), (1,)),
            TensorView(2, 2, "bfloat16", (2, 8), (1, 2), 3),
            TensorView(3, 4, "bool", (), ()),
        ),
        tasks=(
            Task(
                0,
                "aten.mm.default",
                "layers.0",
                args=(Ref(0), None, True, 1, 1.0, -0.0, 1e-5, 'a"b\nü', 2**70, (), ((Ref(1),), 2)),
                kwargs=(
                    ("dtype", Symbol("dtype", "float32")),
                    ("value", -math.inf),
                    ("other", (math.inf, b"\x00\x01")),
                ),
                results=(2, None),
                reads=(0, 1),
                writes=(2,),
                workspace_bytes=512,
                flops=1000,
                moved_bytes=99,
                time_ns=17,
            ),
            Task(1, "aten.copy_.default", results=(), reads=(2,), touches=(4,)),
        ),
        inputs=(GraphInput(0, 1),),
        outputs=(
            GraphOutput(tensor=3),
            GraphOutput(position=0),
            GraphOutput(host=1),
            GraphOutput(),
        ),
        versions=VERSIONS,
        calls=(
            ModuleCall("", "Model", 0, 0, 2),
            ModuleCall("layers.0", "Linear", 1, 0, 1),
            ModuleCall("drop", "Dropout", 1, 2, 2),
        ),
        num_batches=3,
    )


def make_memgraph(graph: TaskGraph) -> MemGraph:
    return MemGraph(
        graph=graph,
        policy="finepage",
        arena_bytes=1024,
        alignment=64,
        nodes=(
            Node(0, NodeKind.RESIDENT, buffer=0, extent=Extent(64, 64)),
            Node(1, NodeKind.STORED, buffer=0),
            Node(2, NodeKind.ALLOC, buffer=2, extent=Extent(0, 64)),
            Node(3, NodeKind.COMPUTE, task=0),
            Node(4, NodeKind.COMPUTE, task=1),
            Node(5, NodeKind.DROP, buffer=2, extent=Extent(0, 64)),
        ),
        edges=(
            Edge(0, 3, EdgeKind.DATA),
            Edge(2, 3, EdgeKind.ALLOC),
            Edge(3, 4, EdgeKind.DATA),
            Edge(4, 5, EdgeKind.READ_DROP),
        ),
        entry=(Residency(0, Extent(64, 64)),),
        exit=(Residency(0, Extent(64, 64)),),
        host_slots=((2, 128),),
        host_bytes=192,
    )


def make_timeline() -> Timeline:
    spans = (Span(3, Lane.COMPUTE, 5, 9, "mm"), Span(2, Lane.H2D, 0, 5), Span(5, Lane.D2H, 9, 9))
    return Timeline(spans, 9, 4, 5, 5, 128, 5)


def make_profile() -> HardwareProfile:
    return HardwareProfile(
        name="box",
        source="measured",
        capacity_bytes=2**34,
        h2d_bytes_per_s=1.5e9,
        d2h_bytes_per_s=2e9,
        memory_bytes_per_s=1e11,
        flops_per_s={"float32": 1e12, "default": 5e11},
        launch_ns=10,
        transfer_latency_ns=20,
    )


def make_large_graph() -> TaskGraph:
    """About as large as a captured 65B model."""
    num_tasks, num_tensors, num_buffers = 8_000, 20_000, 9_000
    return TaskGraph(
        name="large",
        buffers=tuple(
            Buffer(i, BufferKind.ACTIVATION, 2**20, f"layers.{i}.mlp") for i in range(num_buffers)
        ),
        tensors=tuple(
            TensorView(i, i % num_buffers, "bfloat16", (1, 2048, 64, 128), (8192, 128, 128, 1))
            for i in range(num_tensors)
        ),
        tasks=tuple(
            Task(
                i,
                "aten.mm.default",
                f"model.layers.{i // 100}.mlp.up_proj",
                args=(Ref(i), Ref(i + 1), (1, -1, None), 1e-5, Symbol("dtype", "bfloat16")),
                kwargs=(("alpha", 1.0),),
                results=(i + 2,),
                reads=(i, i + 1),
                writes=(i + 2 if i + 2 < num_buffers else 0,),
                flops=10**12,
                moved_bytes=10**9,
            )
            for i in range(num_tasks)
        ),
    )


GRAPH = make_graph()
STANDALONE = [GRAPH, make_timeline(), make_profile()]


# --- round trips -----------------------------------------------------------------------------


def typed(value: Any) -> Any:
    """A value together with its types, because 1 == 1.0 == True and 0.0 == -0.0."""
    if isinstance(value, tuple):
        return tuple(typed(v) for v in value)
    return (type(value), repr(value))


@pytest.mark.parametrize("obj", STANDALONE, ids=lambda obj: type(obj).__name__)
def test_round_trip_keeps_everything(obj: Any) -> None:
    back = codec.loads(codec.dumps(obj))
    assert back == obj
    assert codec.loads(codec.dumps(obj), type(obj)) == obj
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
    back = codec.loads_memgraph(codec.dumps(memgraph), GRAPH)
    assert back == memgraph
    assert codec.dumps(back) == codec.dumps(memgraph)


def test_empty_graph_round_trip() -> None:
    graph = TaskGraph("", (), (), ())
    assert codec.loads(codec.dumps(graph)) == graph
    empty = MemGraph(graph, "none", 0, 1, (), (), (), ())
    assert codec.loads_memgraph(codec.dumps(empty), graph) == empty


def test_equal_objects_give_equal_bytes() -> None:
    assert codec.dumps(make_graph()) == codec.dumps(make_graph())
    profile = make_profile()
    other_order = dataclasses.replace(
        profile, capacity_bytes=2**34, flops_per_s=dict(reversed(profile.flops_per_s.items()))
    )
    as_integers = dataclasses.replace(profile, h2d_bytes_per_s=1_500_000_000)
    assert codec.dumps(other_order) == codec.dumps(as_integers) == codec.dumps(profile)


def test_bytes_do_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    codec.save(GRAPH, tmp_path / "graph.json")
    script = (
        "import sys; from ds_finepage.graph import codec; "
        "sys.stdout.write(codec.fingerprint(codec.load(sys.argv[1])))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", script, str(tmp_path / "graph.json")],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert found == {codec.fingerprint(GRAPH)}


def test_text_is_ascii_with_one_row_a_line() -> None:
    text = codec.dumps(GRAPH)
    assert text.isascii() and text.endswith("}\n")
    assert sum(line.startswith("[") for line in text.splitlines()) == 5 + 4 + 2 + 1 + 4 + 3


def test_large_graph_in_a_second() -> None:
    graph = make_large_graph()
    start = time.process_time()
    back = codec.loads(codec.dumps(graph))
    # About 0.7 s by itself; the rest is for slow machines.
    assert time.process_time() - start < 3.0
    assert back == graph


# --- fingerprint -----------------------------------------------------------------------------


def with_task(graph: TaskGraph, **changes: Any) -> TaskGraph:
    first = dataclasses.replace(graph.tasks[0], **changes)
    return dataclasses.replace(graph, tasks=(first, *graph.tasks[1:]))


@pytest.mark.parametrize("changes", [{"workspace_bytes": 7}, {"time_ns": None}])
def test_fingerprint_leaves_measured_costs_out(changes: dict[str, Any]) -> None:
    assert codec.fingerprint(with_task(GRAPH, **changes)) == codec.fingerprint(GRAPH)


def test_fingerprint_leaves_versions_out() -> None:
    other = dataclasses.replace(GRAPH, versions=(("torch", "2.14.0"),))
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


# --- memgraphs belong to a taskgraph ---------------------------------------------------------


def test_memgraph_of_another_model_is_refused() -> None:
    text = codec.dumps(make_memgraph(GRAPH))
    other = dataclasses.replace(with_task(GRAPH, op="aten.add.Tensor"), name="other")
    with pytest.raises(InvalidPlanError, match="another model or version") as caught:
        codec.loads_memgraph(text, other)
    message = str(caught.value)
    assert "'tiny'" in message and "'other'" in message and "Plan again" in message
    assert codec.fingerprint(GRAPH)[:12] in message and codec.fingerprint(other)[:12] in message


def test_memgraph_of_another_version_is_refused() -> None:
    text = codec.dumps(make_memgraph(GRAPH))
    other = dataclasses.replace(GRAPH, versions=())
    with pytest.raises(InvalidPlanError, match=r"torch 2\.13\.0.*no versions.*Plan again"):
        codec.loads_memgraph(text, other)


def test_memgraph_of_other_measured_costs_is_accepted() -> None:
    measured = with_task(GRAPH, time_ns=12345)
    back = codec.loads_memgraph(codec.dumps(make_memgraph(GRAPH)), measured)
    assert back.graph is measured


def test_memgraph_needs_its_taskgraph() -> None:
    with pytest.raises(InvalidPlanError, match="load_memgraph"):
        codec.loads(codec.dumps(make_memgraph(GRAPH)))


# --- what cannot be written ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "graph"),
    [
        ("buffer", dataclasses.replace(GRAPH, buffers=GRAPH.buffers[1:])),
        ("tensor", dataclasses.replace(GRAPH, tensors=GRAPH.tensors[1:])),
        ("task", dataclasses.replace(GRAPH, tasks=GRAPH.tasks[1:])),
    ],
)
def test_ids_must_be_positions(what: str, graph: TaskGraph) -> None:
    with pytest.raises(InvalidPlanError, match=f"{what} at position 0 has id 1"):
        codec.dumps(graph)


def test_node_ids_must_be_positions() -> None:
    memgraph = make_memgraph(GRAPH)
    with pytest.raises(InvalidPlanError, match="node at position 0 has id 1"):
        codec.dumps(dataclasses.replace(memgraph, nodes=memgraph.nodes[1:]))


@pytest.mark.parametrize("value", [[1], {"a": 1}, 1j, BufferKind.WEIGHT, {1}])
def test_other_types_in_arguments_are_refused(value: Any) -> None:
    for changes in ({"args": ((value,),)}, {"kwargs": (("x", value),)}):
        with pytest.raises(InvalidPlanError, match=r"task 0 aten.mm.*cannot be written down"):
            codec.dumps(with_task(GRAPH, **changes))


def test_rates_that_are_not_finite_are_refused() -> None:
    with pytest.raises(InvalidPlanError, match="'box'.*not finite"):
        codec.dumps(dataclasses.replace(make_profile(), h2d_bytes_per_s=math.inf))


# --- what cannot be read ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"kind": NaN}',
        '{"kind": "taskgraph", "kind": "taskgraph"}',
        "[" * 100_000,
        '{"kind": ' + "1" * 10_000 + "}",
    ],
)
def test_corrupt_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidPlanError, match="corrupt JSON"):
        codec.loads(text)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"taskgraph"', "true"])
def test_json_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidPlanError, match="expected a JSON object"):
        codec.loads(text)


@pytest.mark.parametrize("text", ["{}", '{"kind": "taskgraph"}', '{"format": 1}'])
def test_files_of_others_are_refused(text: str) -> None:
    with pytest.raises(InvalidPlanError, match="not a file of ds_finepage"):
        codec.loads(text)


def test_wrong_kind_is_refused() -> None:
    with pytest.raises(InvalidPlanError, match="kind is 'timeline'; expected taskgraph"):
        codec.loads(codec.dumps(make_timeline()), TaskGraph)
    with pytest.raises(InvalidPlanError, match="kind is 'timeline'; expected memgraph"):
        codec.loads_memgraph(codec.dumps(make_timeline()), GRAPH)
    with pytest.raises(InvalidPlanError, match="kind is 3"):
        codec.loads('{"kind": 3, "format": 1}')


@pytest.mark.parametrize("version", [0, 2, "1", 1.0, True, None])
def test_wrong_format_version_is_refused(version: Any) -> None:
    text = edited(GRAPH, lambda d: d.update(format=version))
    with pytest.raises(InvalidPlanError, match=r"format version .* reads 1\. Make the file anew"):
        codec.loads(text)


def edited(obj: Any, edit: Callable[[dict[str, Any]], Any]) -> str:
    document = json.loads(codec.dumps(obj))
    edit(document)
    return json.dumps(document)


def cell(table: str, row: int, column: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """An edit of one value in one row."""

    def edit(document: dict[str, Any]) -> None:
        position = document[table]["columns"].index(column)
        document[table]["rows"][row][position] = value

    return edit


def field(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update({name: value})


WRONG_GRAPHS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.pop("tasks"), r"the file has wrong fields \(missing: tasks\)"),
    (field("extra", 1), r"the file has wrong fields \(unknown: extra\)"),
    (field("name", 1), "name must be a string, not the number 1"),
    (field("versions", {}), "versions must be an array, not an object"),
    (field("versions", [["torch"]]), r"versions holds \['torch'\]"),
    (field("versions", [["torch", 2.13]]), "versions must be a string"),
    (field("tasks", []), "tasks must be an object, not an array"),
    (lambda d: d["tasks"].pop("rows"), r"tasks has wrong fields \(missing: rows\)"),
    (lambda d: d["tasks"]["columns"].reverse(), "tasks has the columns"),
    (lambda d: d["tasks"].update(rows=None), "tasks.rows must be an array, not null"),
    (lambda d: d["tasks"]["rows"].__setitem__(1, 5), r"tasks\[1\] must be an array"),
    (lambda d: d["tasks"]["rows"][1].pop(), r"tasks\[1\] has 12 values; expected 13"),
    (lambda d: d["tasks"]["rows"][1].append(0), r"tasks\[1\] has 14 values; expected 13"),
    (cell("buffers", 1, "id", 2), r"buffers\[1\] has id 2; ids must be positions"),
    (cell("buffers", 1, "kind", "wait"), r"buffers\[1\]\.kind is 'wait'; expected one of weight,"),
    (cell("buffers", 1, "kind", []), r"buffers\[1\]\.kind is \[\]"),
    (cell("buffers", 1, "nbytes", -1), r"buffers\[1\]\.nbytes is -1; it must not be negative"),
    (cell("buffers", 1, "nbytes", 1.0), r"buffers\[1\]\.nbytes must be an integer"),
    (cell("buffers", 1, "nbytes", True), r"buffers\[1\]\.nbytes must be an integer, not a bool"),
    (cell("buffers", 1, "name", None), r"buffers\[1\]\.name must be a string, not null"),
    (cell("buffers", 3, "payload", "A"), r"buffers\[3\]\.payload is not base64"),
    (cell("buffers", 3, "payload", "ü==="), r"buffers\[3\]\.payload is not base64"),
    (cell("buffers", 3, "payload", 5), r"buffers\[3\]\.payload must be a string"),
    (cell("tensors", 2, "id", 0), r"tensors\[2\] has id 0"),
    (cell("tensors", 2, "buffer", 5), r"tensors\[2\]\.buffer is 5, which is no id out of 5"),
    (cell("tensors", 2, "buffer", -1), r"tensors\[2\]\.buffer is -1"),
    (cell("tensors", 2, "buffer", True), r"tensors\[2\]\.buffer is True"),
    (cell("tensors", 2, "dtype", 32), r"tensors\[2\]\.dtype must be a string"),
    (cell("tensors", 2, "shape", [2]), r"tensors\[2\] has 1 sizes but 2 strides"),
    (cell("tensors", 2, "shape", [2, -8]), r"tensors\[2\]\.shape is -8"),
    (cell("tensors", 2, "stride", "12"), r"tensors\[2\]\.stride must be an array, not a string"),
    (cell("tensors", 2, "offset", None), r"tensors\[2\]\.offset must be an integer, not null"),
    (cell("tasks", 1, "index", 0), r"tasks\[1\] has id 0"),
    (cell("tasks", 1, "op", None), r"tasks\[1\]\.op must be a string"),
    (cell("tasks", 1, "label", 1), r"tasks\[1\]\.label must be a string"),
    (cell("tasks", 1, "args", None), r"tasks\[1\]\.args must be an array"),
    (cell("tasks", 1, "args", [{"ref": 4}]), r"tasks\[1\]\.args is 4, which is no id out of 4"),
    (cell("tasks", 1, "args", [{"ref": 1, "x": 1}]), r"tasks\[1\]\.args holds .* for nothing"),
    (cell("tasks", 1, "args", [{}]), r"tasks\[1\]\.args holds {}, which stands for nothing"),
    (cell("tasks", 1, "args", [{"symbol": ["dtype"]}]), r"tasks\[1\]\.args holds .* for nothing"),
    (cell("tasks", 1, "args", [{"symbol": [1, "x"]}]), r"tasks\[1\]\.args must be a string"),
    (cell("tasks", 1, "args", [{"float": "1"}]), r"tasks\[1\]\.args holds .* for nothing"),
    (cell("tasks", 1, "args", [{"float": 1}]), r"tasks\[1\]\.args holds .* for nothing"),
    (cell("tasks", 1, "args", [[{"bytes": "?"}]]), r"tasks\[1\]\.args is not base64"),
    (cell("tasks", 1, "kwargs", [["x"]]), r"tasks\[1\]\.kwargs holds \['x'\]"),
    (cell("tasks", 1, "kwargs", [[1, 2]]), r"tasks\[1\]\.kwargs must be a string"),
    (cell("tasks", 1, "kwargs", [["x", {"y": 1}]]), r"tasks\[1\]\.kwargs\.x holds"),
    (cell("tasks", 1, "results", [9]), r"tasks\[1\]\.results is 9, which is no id out of 4"),
    (cell("tasks", 1, "reads", [7]), r"tasks\[1\]\.reads is 7, which is no id out of 5"),
    (cell("tasks", 1, "writes", [2, 1]), r"tasks\[1\]\.writes must be sorted"),
    (cell("tasks", 1, "touches", [2, 2]), r"tasks\[1\]\.touches must be sorted and free of rep"),
    (cell("tasks", 1, "workspace_bytes", -5), r"tasks\[1\]\.workspace_bytes is -5"),
    (cell("tasks", 1, "flops", 0.5), r"tasks\[1\]\.flops must be an integer"),
    (cell("tasks", 1, "moved_bytes", "0"), r"tasks\[1\]\.moved_bytes must be an integer"),
    (cell("tasks", 1, "time_ns", -1), r"tasks\[1\]\.time_ns is -1"),
    (cell("inputs", 0, "position", -1), r"inputs\[0\]\.position is -1"),
    (cell("inputs", 0, "tensor", 4), r"inputs\[0\]\.tensor is 4"),
    (cell("outputs", 0, "tensor", 4), r"outputs\[0\]\.tensor is 4"),
    (cell("outputs", 1, "position", "0"), r"outputs\[1\]\.position must be an integer"),
    (cell("outputs", 2, "host", -1), r"outputs\[2\]\.host is -1"),
    (cell("outputs", 1, "host", 0), r"outputs\[1\] is more than one of tensor, position, host"),
    (cell("calls", 1, "name", None), r"calls\[1\]\.name must be a string"),
    (cell("calls", 1, "class_name", 1), r"calls\[1\]\.class_name must be a string"),
    (cell("calls", 1, "depth", -1), r"calls\[1\]\.depth is -1"),
    (cell("calls", 0, "end", 3), r"calls\[0\] runs tasks \[0, 3\), not inside 0\.\.2"),
    (cell("calls", 2, "begin", 3), r"calls\[2\] runs tasks \[3, 2\), not inside 0\.\.2"),
    (field("num_batches", -1), "num_batches is -1"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG_GRAPHS, ids=[m for _, m in WRONG_GRAPHS])
def test_wrong_taskgraphs_are_refused(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        codec.loads(edited(GRAPH, edit))


def test_numbers_that_no_float_holds_are_refused() -> None:
    text = codec.dumps(GRAPH).replace("1e-05", "1e999")
    with pytest.raises(InvalidPlanError, match=r"tasks\[0\]\.args is too large for a float"):
        codec.loads(text)


WRONG_MEMGRAPHS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.pop("edges"), r"the file has wrong fields \(missing: edges\)"),
    (field("extra", 1), r"the file has wrong fields \(unknown: extra\)"),
    (field("fingerprint", 1), "fingerprint must be a string"),
    (field("taskgraph", None), "taskgraph must be a string"),
    (field("policy", []), "policy must be a string"),
    (field("arena_bytes", -1), "arena_bytes is -1"),
    (field("alignment", "64"), "alignment must be an integer"),
    (field("host_bytes", 0.0), "host_bytes must be an integer"),
    (cell("nodes", 2, "id", 1), r"nodes\[2\] has id 1"),
    (cell("nodes", 2, "kind", "evict"), r"nodes\[2\]\.kind is 'evict'; expected one of resident"),
    (cell("nodes", 2, "buffer", 5), r"nodes\[2\]\.buffer is 5, which is no id out of 5"),
    (cell("nodes", 3, "task", 2), r"nodes\[3\]\.task is 2, which is no id out of 2"),
    (cell("nodes", 2, "offset", None), r"nodes\[2\] has one of offset and nbytes without"),
    (cell("nodes", 2, "offset", -64), r"nodes\[2\]\.offset is -64"),
    (cell("nodes", 2, "nbytes", 1.5), r"nodes\[2\]\.nbytes must be an integer"),
    (cell("edges", 0, "before", 6), r"edges\[0\]\.before is 6, which is no id out of 6"),
    (cell("edges", 0, "after", -1), r"edges\[0\]\.after is -1"),
    (cell("edges", 0, "kind", "why"), r"edges\[0\]\.kind is 'why'; expected one of data"),
    (cell("entry", 0, "buffer", 9), r"entry\[0\]\.buffer is 9"),
    (cell("exit", 0, "offset", None), r"exit\[0\]\.offset must be an integer, not null"),
    (field("routed", [1, 0]), "routed must be sorted"),
    (cell("host_slots", 0, "buffer", 9), r"host_slots\[0\]\.buffer is 9"),
    (cell("host_slots", 0, "offset", -1), r"host_slots\[0\]\.offset is -1"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG_MEMGRAPHS, ids=[m for _, m in WRONG_MEMGRAPHS])
def test_wrong_memgraphs_are_refused(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        codec.loads_memgraph(edited(make_memgraph(GRAPH), edit), GRAPH)


WRONG_TIMELINES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.pop("total_ns"), r"the file has wrong fields \(missing: total_ns\)"),
    (field("total_ns", -1), "total_ns is -1"),
    (cell("spans", 0, "node", -1), r"spans\[0\]\.node is -1"),
    (cell("spans", 0, "lane", "d2d"), r"spans\[0\]\.lane is 'd2d'; expected one of compute, h2d"),
    (cell("spans", 0, "end_ns", 4), r"spans\[0\] ends at 4 ns, before it starts at 5 ns"),
    (cell("spans", 0, "start_ns", 0.5), r"spans\[0\]\.start_ns must be an integer"),
    (cell("spans", 0, "name", 3), r"spans\[0\]\.name must be a string"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG_TIMELINES, ids=[m for _, m in WRONG_TIMELINES])
def test_wrong_timelines_are_refused(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        codec.loads(edited(make_timeline(), edit))


WRONG_PROFILES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.pop("source"), r"the file has wrong fields \(missing: source\)"),
    (field("flops_per_s", 1), "flops_per_s must be an object, not the number 1"),
    (field("flops_per_s", {"default": "1"}), r"flops_per_s\.default must be a number"),
    (field("h2d_bytes_per_s", True), "h2d_bytes_per_s must be a number, not a boolean"),
    (field("h2d_bytes_per_s", 10**400), "h2d_bytes_per_s is too large for a float"),
    (field("capacity_bytes", 1.5), "capacity_bytes must be an integer"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG_PROFILES, ids=[m for _, m in WRONG_PROFILES])
def test_wrong_profiles_are_refused(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        codec.loads(edited(make_profile(), edit))


# --- files -----------------------------------------------------------------------------------


def test_save_and_load(tmp_path: Path) -> None:
    for position, obj in enumerate(STANDALONE):
        path = tmp_path / f"{position}.json"
        codec.save(obj, path)
        assert codec.load(path) == codec.load(str(path), expect=type(obj)) == obj
    codec.save(make_memgraph(GRAPH), tmp_path / "plan.json")
    assert codec.load_memgraph(tmp_path / "plan.json", GRAPH) == make_memgraph(GRAPH)


def test_errors_of_files_begin_with_the_path(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    codec.save(make_timeline(), path)
    for read in (lambda: codec.load(path, TaskGraph), lambda: codec.load_memgraph(path, GRAPH)):
        with pytest.raises(InvalidPlanError, match=f"^{re.escape(str(path))}: kind is"):
            read()


def test_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidPlanError, match=r"plan\.json: not UTF-8"):
        codec.load(path)


@pytest.mark.parametrize("name", ["missing.json", ".", "null\0byte"])
def test_unreadable_file_is_the_users_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        codec.load(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot read"):
        codec.load_memgraph(tmp_path / name, GRAPH)


@pytest.mark.parametrize("name", ["missing/plan.json", "null\0byte"])
def test_unwritable_file_is_the_users_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        codec.save(GRAPH, tmp_path / name)


def test_save_replaces_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "graph.json"
    path.write_text("old" * 100_000)
    codec.save(GRAPH, path)
    assert path.read_text() == codec.dumps(GRAPH)
    assert os.listdir(tmp_path) == ["graph.json"]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_failed_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "graph.json"
    path.write_text("old")

    def fail(fd: int) -> None:
        raise error

    monkeypatch.setattr(os, "fsync", fail)
    expected = ConfigError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        codec.save(GRAPH, path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["graph.json"]


def test_what_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidPlanError):
        codec.save(with_task(GRAPH, args=([],)), tmp_path / "graph.json")
    assert os.listdir(tmp_path) == []


def test_saved_file_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    codec.save(GRAPH, tmp_path / "graph.json")
    usual, saved = ((tmp_path / name).stat().st_mode for name in ("usual", "graph.json"))
    assert usual == saved
