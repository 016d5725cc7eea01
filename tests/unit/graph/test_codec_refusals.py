"""The codec refuses a file in which anything is wrong, and names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.errors import InvalidPlanError
from ds_finepage.graph import codec
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.graph.timeline import Timeline
from tests.unit.graph.examples import (
    GRAPH,
    STANDALONE,
    make_memgraph,
    make_profile,
    make_timeline,
)


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
    """Make an edit of one value in one row."""

    def edit(document: dict[str, Any]) -> None:
        assert column in document[table][row]
        document[table][row][column] = value

    return edit


def field(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.update({name: value})


OF_OTHER_TYPES: dict[type, tuple[str, list[Any]]] = {
    dict: ("an object", [[], 5, None]),
    list: ("a valid array", [{}, "12", None]),
    str: ("a valid string|a valid bytes|'", [1, [], None]),
    int: ("a valid integer|greater than or equal to 0", ["0", 1.0, True, None, -1]),
    float: ("a valid number", ["1", True, None]),
    type(None): ("a valid |an object", [[]]),
}
"""What the message asks for, and values that a file may not have there."""


def values_in(found: Any, path: str = "") -> Iterator[tuple[str, Any, Any, Any]]:
    """Walk a document: the path of each value, the value, and what holds it under which key."""
    for key, value in found.items() if isinstance(found, dict) else enumerate(found):
        here = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}".lstrip(".")
        if re.search(r"^kind$|^format$|\.args\[|kwargs\[\d\]\[1\]", here):
            continue  # they have tests of their own; an argument of a task may have many types
        yield here, value, found, key
        if isinstance(value, (dict, list)):
            yield from values_in(value, here)


@pytest.mark.parametrize("obj", [*STANDALONE, make_memgraph(GRAPH)], ids=lambda o: type(o).__name__)
def test_each_value_of_another_type_is_refused_by_its_place(obj: Any) -> None:
    document = json.loads(codec.dumps(obj))
    places = list(values_in(document))
    optional = {re.sub(r"\d", "", path) for path, value, *_ in places if value is None}
    for path, value, holder, key in places:
        wanted, others = OF_OTHER_TYPES[type(value)]
        for other in others:
            if other is None and re.sub(r"\d", "", path) in optional:
                continue
            if other == -1 and isinstance(obj, HardwareProfile):
                continue  # `require_usable` refuses it
            holder[key] = other
            found = re.escape(f"found {other!r}. Write the file again")
            message = f"^{re.escape(path)}: Input should be ({wanted}).*; {found}"
            with pytest.raises(InvalidPlanError, match=message):
                codec.loads(json.dumps(document), type(obj))
        holder[key] = value


NO_ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"ref": 1, "x": 1},
    {"symbol": ["dtype"]},
    {"symbol": [1, "x"]},
    {"float": "1"},
    {"float": 1},
]
WRONG_GRAPHS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.pop("tasks"), "^tasks: Field required"),
    (field("extra", 1), "^extra: Extra inputs are not permitted"),
    (field("versions", [["torch"]]), r"versions\[0\]\[1\]: Field required"),
    (lambda d: d["tasks"][1].pop("op"), r"tasks\[1\]\.op: Field required"),
    (lambda d: d["tasks"][1].pop("reads"), "a row lacks a field.*Write the file again"),
    (cell("tensors", 2, "id", 0), r"tensors\[2\] has id 0; ids must be positions"),
    (cell("tensors", 2, "shape", [2]), r"tensors\[2\] has 1 sizes but 2 strides"),
    (cell("outputs", 1, "host", 0), r"outputs\[1\] is more than one of tensor, position, host"),
    (cell("calls", 0, "end", 3), r"calls\[0\] runs tasks \[0, 3\), not inside 0\.\.2"),
    (cell("calls", 2, "begin", 3), r"calls\[2\] runs tasks \[3, 2\), not inside 0\.\.2"),
    (lambda d: d["tasks"][1].update(x=0), r"tasks\[1\]\.x: Unexpected keyword argument"),
    (cell("buffers", 1, "kind", "wait"), r"buffers\[1\]\.kind: .*should be 'weight'.*found 'wait'"),
    (cell("buffers", 3, "payload", "A"), r"buffers\[3\]\.payload: .*base64"),
    (cell("buffers", 3, "payload", "ü==="), r"buffers\[3\]\.payload: .*base64"),
    (cell("buffers", 0, "gather", 4), r"buffers\[0\]\.gather is 4, which is no id out of 4"),
    (cell("tensors", 2, "buffer", 5), r"tensors\[2\]\.buffer is 5, which is no id out of 5"),
    (cell("tasks", 1, "args", [{"ref": 4}]), r"tasks\[1\]\.args is 4, which is no id out of 4"),
    *(
        (
            cell("tasks", 1, "args", [x]),
            rf"tasks\[1\]\.args\[0\]: {re.escape(str(x))} stands for no",
        )
        for x in NO_ARGUMENTS
    ),
    (cell("tasks", 1, "args", [[{"bytes": "?"}]]), r"tasks\[1\]\.args\[0\]: .*not base64"),
    (cell("tasks", 1, "kwargs", [["x"]]), r"tasks\[1\]\.kwargs\[0\]\[1\]: Field required"),
    (
        cell("tasks", 1, "kwargs", [["x", {"y": 1}]]),
        r"tasks\[1\]\.kwargs\[0\]\[1\]: .*stands for no argument",
    ),
    (cell("tasks", 1, "kwargs", [["x", [{"ref": 4}]]]), r"tasks\[1\]\.kwargs is 4"),
    (cell("tasks", 1, "results", [9]), r"tasks\[1\]\.results is 9, which is no id out of 4"),
    (cell("inputs", 0, "tensor", 4), r"inputs\[0\]\.tensor is 4"),
    (cell("outputs", 0, "tensor", 4), r"outputs\[0\]\.tensor is 4"),
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
    (lambda d: d["graph"]["tensors"][2].update(buffer=5), r"tensors\[2\]\.buffer is 5, which"),
    (cell("nodes", 1, "kind", "evict"), r"nodes\[1\]\.kind: .*should be 'resident'.*found 'evict'"),
    (lambda d: d["nodes"][1]["extent"].pop("offset"), r"nodes\[1\]\.extent\.offset: Field req"),
    (cell("edges", 0, "kind", "why"), r"edges\[0\]\.kind: .*should be 'data'.*found 'why'"),
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
    (cell("spans", 0, "lane", "d2d"), r"spans\[0\]\.lane: .*should be 'compute'.*found 'd2d'"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG_TIMELINES, ids=[m for _, m in WRONG_TIMELINES])
def test_wrong_timelines_are_refused(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        codec.loads(edited(make_timeline(), edit), Timeline)


WRONG_PROFILES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda d: d.pop("source"), "^source: Field required"),
    (field("h2d_bytes_per_s", 10**400), "h2d_bytes_per_s: .*finite number"),
]


@pytest.mark.parametrize(("edit", "message"), WRONG_PROFILES, ids=[m for _, m in WRONG_PROFILES])
def test_wrong_profiles_are_refused(edit: Callable[[dict[str, Any]], Any], message: str) -> None:
    with pytest.raises(InvalidPlanError, match=message):
        codec.loads(edited(make_profile(), edit), HardwareProfile)
