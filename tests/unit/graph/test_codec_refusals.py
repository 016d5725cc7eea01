"""The codec refuses a file in which anything is wrong, and names the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.errors import InvalidPlanError
from ds_finepage.graph import codec
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.graph.timeline import Timeline
from tests.unit.graph.examples import GRAPH, make_memgraph, make_profile, make_timeline


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[" * 100_000,
        '{"kind": ' + "1" * 10_000 + "}",
        '{"kind": "taskgraph", "kind": "taskgraph"}',
    ],
)
def test_corrupt_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidPlanError, match="^Invalid JSON"):
        codec.loads(text, TaskGraph)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"taskgraph"', "true"])
def test_json_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(InvalidPlanError, match="^Input should be an object"):
        codec.loads(text, TaskGraph)


@pytest.mark.parametrize("text", ["{}", '{"kind": NaN}', '{"kind": "taskgraph"}', '{"format": 1}'])
def test_files_of_others_are_refused(text: str) -> None:
    with pytest.raises(InvalidPlanError, match="^(kind|format|name): .*Write the file again"):
        codec.loads(text, TaskGraph)


def test_wrong_kind_is_refused() -> None:
    with pytest.raises(InvalidPlanError, match="kind: .*should be 'taskgraph'; found 'timeline'"):
        codec.loads(codec.dumps(make_timeline()), TaskGraph)
    with pytest.raises(InvalidPlanError, match="kind: .*should be 'memgraph'; found 'timeline'"):
        codec.loads(codec.dumps(make_timeline()), MemGraph)
    with pytest.raises(InvalidPlanError, match="kind: .*found 3"):
        codec.loads('{"kind": 3, "format": 1}', TaskGraph)


@pytest.mark.parametrize("version", [0, 1, 2, 3, 4, 6, "5", True, None])
def test_wrong_format_version_is_refused(version: Any) -> None:
    text = edited(GRAPH, lambda d: d.update(format=version))
    with pytest.raises(InvalidPlanError, match=r"format: .*should be 5; .*Write the file again"):
        codec.loads(text, TaskGraph)


def edited(obj: Any, edit: Callable[[dict[str, Any]], Any]) -> str:
    document = json.loads(codec.dumps(obj))
    edit(document)
    return json.dumps(document)


def cell(table: str, row: int, column: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Make an edit of one value in one row; a dot leads into an object in the row."""

    def edit(document: dict[str, Any]) -> None:
        *outer, last = column.split(".")
        found = document[table][row]
        for name in outer:
            found = found[name]
        assert last in found
        found[last] = value

    return edit


def field(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update({name: value})


WRONG_GRAPHS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.pop("tasks"), "^tasks: Field required"),
    (field("extra", 1), "^extra: Extra inputs are not permitted"),
    (field("name", 1), "name: .*valid string; found 1"),
    (field("versions", {}), "versions: .*valid array; found {}"),
    (field("versions", [["torch"]]), r"versions\[0\]\[1\]: Field required"),
    (field("versions", [["torch", 2.13]]), r"versions\[0\]\[1\]: .*valid string; found 2\.13"),
    (field("tasks", {}), "tasks: .*valid array; found {}"),
    (field("tasks", None), "tasks: .*valid array; found None"),
    (lambda d: d["tasks"].__setitem__(1, 5), r"tasks\[1\]: .*object; found 5"),
    (lambda d: d["tasks"][1].pop("op"), r"tasks\[1\]\.op: Field required"),
    (lambda d: d["tasks"][1].pop("reads"), "a row lacks a field.*Write the file again"),
    (cell("tensors", 2, "id", 0), r"tensors\[2\] has id 0; ids must be positions"),
    (cell("tensors", 2, "shape", [2]), r"tensors\[2\] has 1 sizes but 2 strides"),
    (cell("outputs", 1, "host", 0), r"outputs\[1\] is more than one of tensor, position, host"),
    (cell("calls", 0, "end", 3), r"calls\[0\] runs tasks \[0, 3\), not inside 0\.\.2"),
    (cell("calls", 2, "begin", 3), r"calls\[2\] runs tasks \[3, 2\), not inside 0\.\.2"),
    (lambda d: d["tasks"][1].update(x=0), r"tasks\[1\]\.x: Unexpected keyword argument"),
    (cell("buffers", 1, "kind", "wait"), r"buffers\[1\]\.kind: .*should be 'weight'.*found 'wait'"),
    (cell("buffers", 1, "kind", []), r"buffers\[1\]\.kind: .*found \[\]"),
    (
        cell("buffers", 1, "nbytes", -1),
        r"buffers\[1\]\.nbytes: .*greater than or equal to 0; found -1",
    ),
    (cell("buffers", 1, "nbytes", 1.0), r"buffers\[1\]\.nbytes: .*valid integer"),
    (cell("buffers", 1, "nbytes", True), r"buffers\[1\]\.nbytes: .*valid integer"),
    (cell("buffers", 1, "name", None), r"buffers\[1\]\.name: .*valid string"),
    (cell("buffers", 3, "payload", "A"), r"buffers\[3\]\.payload: .*base64"),
    (cell("buffers", 3, "payload", "ü==="), r"buffers\[3\]\.payload: .*base64"),
    (cell("buffers", 3, "payload", 5), r"buffers\[3\]\.payload: .*valid bytes"),
    (cell("buffers", 0, "gather", 4), r"buffers\[0\]\.gather is 4, which is no id out of 4"),
    (cell("tensors", 2, "buffer", 5), r"tensors\[2\]\.buffer is 5, which is no id out of 5"),
    (
        cell("tensors", 2, "buffer", -1),
        r"tensors\[2\]\.buffer: .*greater than or equal to 0; found -1",
    ),
    (cell("tensors", 2, "buffer", True), r"tensors\[2\]\.buffer: .*valid integer; found True"),
    (cell("tensors", 2, "dtype", 32), r"tensors\[2\]\.dtype: .*valid string"),
    (
        cell("tensors", 2, "shape", [2, -8]),
        r"tensors\[2\]\.shape\[1\]: .*greater than or equal to 0; found -8",
    ),
    (cell("tensors", 2, "stride", "12"), r"tensors\[2\]\.stride: .*valid array"),
    (cell("tensors", 2, "offset", None), r"tensors\[2\]\.offset: .*valid integer"),
    (cell("tasks", 1, "op", None), r"tasks\[1\]\.op: .*valid string"),
    (cell("tasks", 1, "label", 1), r"tasks\[1\]\.label: .*valid string"),
    (cell("tasks", 1, "args", None), r"tasks\[1\]\.args: .*valid array"),
    (cell("tasks", 1, "args", [{"ref": 4}]), r"tasks\[1\]\.args is 4, which is no id out of 4"),
    (
        cell("tasks", 1, "args", [{"ref": 1, "x": 1}]),
        r"tasks\[1\]\.args\[0\]: .*stands for no argument",
    ),
    (cell("tasks", 1, "args", [{}]), r"tasks\[1\]\.args\[0\]: {} stands for no argument"),
    (
        cell("tasks", 1, "args", [{"symbol": ["dtype"]}]),
        r"tasks\[1\]\.args\[0\]: .*stands for no argument",
    ),
    (
        cell("tasks", 1, "args", [{"symbol": [1, "x"]}]),
        r"tasks\[1\]\.args\[0\]: .*stands for no argument",
    ),
    (
        cell("tasks", 1, "args", [{"float": "1"}]),
        r"tasks\[1\]\.args\[0\]: .*stands for no argument",
    ),
    (cell("tasks", 1, "args", [{"float": 1}]), r"tasks\[1\]\.args\[0\]: .*stands for no argument"),
    (cell("tasks", 1, "args", [[{"bytes": "?"}]]), r"tasks\[1\]\.args\[0\]: .*not base64"),
    (cell("tasks", 1, "kwargs", [["x"]]), r"tasks\[1\]\.kwargs\[0\]\[1\]: Field required"),
    (
        cell("tasks", 1, "kwargs", [[1, 2]]),
        r"tasks\[1\]\.kwargs\[0\]\[0\]: .*valid string; found 1",
    ),
    (
        cell("tasks", 1, "kwargs", [["x", {"y": 1}]]),
        r"tasks\[1\]\.kwargs\[0\]\[1\]: .*stands for no argument",
    ),
    (cell("tasks", 1, "kwargs", [["x", [{"ref": 4}]]]), r"tasks\[1\]\.kwargs is 4"),
    (cell("tasks", 1, "results", [9]), r"tasks\[1\]\.results is 9, which is no id out of 4"),
    (
        cell("tasks", 1, "workspace_bytes", -5),
        r"tasks\[1\]\.workspace_bytes: .*greater than or equal to 0; found -5",
    ),
    (cell("tasks", 1, "flops", 0.5), r"tasks\[1\]\.flops: .*valid integer"),
    (cell("tasks", 1, "moved_bytes", "0"), r"tasks\[1\]\.moved_bytes: .*valid integer"),
    (
        cell("tasks", 1, "time_ns", -1),
        r"tasks\[1\]\.time_ns: .*greater than or equal to 0; found -1",
    ),
    (
        cell("inputs", 0, "position", -1),
        r"inputs\[0\]\.position: .*greater than or equal to 0; found -1",
    ),
    (cell("inputs", 0, "tensor", 4), r"inputs\[0\]\.tensor is 4"),
    (cell("outputs", 0, "tensor", 4), r"outputs\[0\]\.tensor is 4"),
    (cell("outputs", 1, "position", "0"), r"outputs\[1\]\.position: .*valid integer"),
    (cell("outputs", 2, "host", -1), r"outputs\[2\]\.host: .*greater than or equal to 0; found -1"),
    (cell("calls", 1, "name", None), r"calls\[1\]\.name: .*valid string"),
    (cell("calls", 1, "class_name", 1), r"calls\[1\]\.class_name: .*valid string"),
    (cell("calls", 1, "depth", -1), r"calls\[1\]\.depth: .*greater than or equal to 0; found -1"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG_GRAPHS, ids=[m for _, m in WRONG_GRAPHS])
def test_wrong_taskgraphs_are_refused(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        codec.loads(edited(GRAPH, edit), TaskGraph)


def test_numbers_that_no_float_holds_are_refused() -> None:
    text = edited(GRAPH, lambda d: d["tasks"][0]["args"].__setitem__(6, 0.125))
    text = text.replace("0.125", "1e999")
    with pytest.raises(InvalidPlanError, match=r"tasks\[0\]\.args\[6\]: .*too large for a float"):
        codec.loads(text, TaskGraph)


WRONG_MEMGRAPHS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.pop("edges"), "^edges: Field required"),
    (lambda d: d["nodes"][1].pop("buffer"), "a row lacks a field"),
    (field("routed", [1, 0]), "routed must be sorted"),
    (field("routed", [5]), r"routed\[0\]\.buffer is 5, which is no id out of 5"),
    (field("extra", 1), "^extra: Extra inputs are not permitted"),
    (lambda d: d["graph"].pop("tasks"), r"graph\.tasks: Field required"),
    (lambda d: d["graph"]["buffers"][1].update(kind=1), r"graph\.buffers\[1\]\.kind: .*found 1"),
    (
        lambda d: d["graph"]["tensors"][2].update(buffer=5),
        r"tensors\[2\]\.buffer is 5, which",
    ),
    (field("policy", []), "policy: .*valid string"),
    (field("arena_bytes", -1), "arena_bytes: .*greater than or equal to 0; found -1"),
    (field("alignment", "64"), "alignment: .*valid integer"),
    (field("host_bytes", 0.0), "host_bytes: .*valid integer"),
    (cell("nodes", 1, "kind", "evict"), r"nodes\[1\]\.kind: .*should be 'resident'.*found 'evict'"),
    (lambda d: d["nodes"][1]["extent"].pop("offset"), r"nodes\[1\]\.extent\.offset: Field req"),
    (cell("nodes", 1, "extent.offset", -64), r"nodes\[1\]\.extent\.offset: .*found -64"),
    (cell("nodes", 1, "extent.nbytes", 1.5), r"nodes\[1\]\.extent\.nbytes: .*valid integer"),
    (cell("nodes", 1, "extent", [0, 64]), r"nodes\[1\]\.extent: .*object; found \[0, 64\]"),
    (cell("edges", 0, "after", -1), r"edges\[0\]\.after: .*greater than or equal to 0; found -1"),
    (cell("edges", 0, "kind", "why"), r"edges\[0\]\.kind: .*should be 'data'.*found 'why'"),
    (cell("exit", 0, "extent.offset", None), r"exit\[0\]\.extent\.offset: .*found None"),
    (field("host_slots", [[2, -1]]), r"host_slots\[0\]\[1\]: .*found -1"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG_MEMGRAPHS, ids=[m for _, m in WRONG_MEMGRAPHS])
def test_wrong_memgraphs_are_refused(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        codec.loads(edited(make_memgraph(GRAPH), edit), MemGraph)


WRONG_IDS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (cell("nodes", 1, "id", 2), "node at position 1 has id 2"),
    (cell("nodes", 1, "buffer", 5), r"buffer 5 is outside 0\.\.4"),
    (cell("nodes", 1, "buffer", None), r"node 1 \(alloc\) lacks buffer"),
    (cell("nodes", 2, "task", 2), r"task 2 is outside 0\.\.1"),
    (cell("edges", 0, "before", 5), r"names a node outside 0\.\.4"),
    (cell("entry", 0, "buffer", 9), "entry lists buffer 9"),
    (field("host_slots", [[9, 128]]), "host slot is for buffer 9"),
    (lambda d: d["graph"]["buffers"][1].update(id=2), "buffer at position 1 has id 2"),
    (lambda d: d["graph"]["tasks"][1].update(index=0), "task at position 1 has index 0"),
    (lambda d: d["graph"]["tasks"][1].update(reads=[7]), r"buffer 7 is outside 0\.\.4"),
    (lambda d: d["graph"]["tasks"][1].update(touches=[4, 4]), "are not sorted or repeat"),
    (lambda d: d["graph"]["tasks"][1].update(writes=[2, 1]), "are not sorted or repeat"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG_IDS, ids=[m for _, m in WRONG_IDS])
def test_wrong_ids_are_the_checkers(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    plan = codec.loads(edited(make_memgraph(GRAPH), edit), MemGraph)
    with pytest.raises(InvalidPlanError, match=message):
        check(plan)


WRONG_TIMELINES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.pop("total_ns"), "^total_ns: Field required"),
    (cell("spans", 0, "end_ns", 4), r"spans\[0\] ends at 4 ns, before it starts at 5 ns"),
    (field("total_ns", -1), "total_ns: .*greater than or equal to 0; found -1"),
    (cell("spans", 0, "node", -1), r"spans\[0\]\.node: .*greater than or equal to 0; found -1"),
    (cell("spans", 0, "lane", "d2d"), r"spans\[0\]\.lane: .*should be 'compute'.*found 'd2d'"),
    (cell("spans", 0, "start_ns", 0.5), r"spans\[0\]\.start_ns: .*valid integer"),
    (cell("spans", 0, "name", 3), r"spans\[0\]\.name: .*valid string"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG_TIMELINES, ids=[m for _, m in WRONG_TIMELINES])
def test_wrong_timelines_are_refused(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        codec.loads(edited(make_timeline(), edit), Timeline)


WRONG_PROFILES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.pop("source"), "^source: Field required"),
    (field("flops_per_s", 1), "flops_per_s: .*object; found 1"),
    (field("flops_per_s", {"default": "1"}), r"flops_per_s\.default: .*valid number"),
    (field("h2d_bytes_per_s", True), "h2d_bytes_per_s: .*valid number; found True"),
    (field("h2d_bytes_per_s", 10**400), "h2d_bytes_per_s: .*finite number"),
    (field("capacity_bytes", 1.5), "capacity_bytes: .*valid integer"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG_PROFILES, ids=[m for _, m in WRONG_PROFILES])
def test_wrong_profiles_are_refused(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        codec.loads(edited(make_profile(), edit), HardwareProfile)
