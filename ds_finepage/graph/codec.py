"""Plain data as versioned JSON, and back without loss (floor 1, no torch).

Reads and writes `TaskGraph`, `MemGraph`, `Timeline` and `HardwareProfile`. Each file says what it
is (``kind``) and in which form (``format``); equal objects give the same bytes, and whatever is not
exactly as expected is refused.

[Note: the form]
One field a line, one row a line, columns named once. A memgraph does not repeat its taskgraph: it
holds its `fingerprint` and the versions, and is read together with the taskgraph it was made for.
Inside the arguments of a task, JSON's null, booleans, numbers and strings stand for themselves, an
array is a tuple, and an object with one key is all that JSON has no word for: ``{"ref": 3}``,
``{"symbol": ["dtype", "float32"]}``, ``{"float": "nan"}``, ``{"bytes": "AAE="}``. Python calls 1,
1.0 and True equal; here they stay different.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar, overload

from ds_finepage.errors import ConfigError, InvalidPlanError
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

FORMAT_VERSION = 1
"""Raised with every change of the form; there is no reader for older ones: plan again."""

Encodable: TypeAlias = TaskGraph | MemGraph | Timeline | HardwareProfile
Standalone: TypeAlias = TaskGraph | Timeline | HardwareProfile
_T = TypeVar("_T", bound=Standalone)

_KINDS: dict[type[Encodable], str] = {
    TaskGraph: "taskgraph",
    MemGraph: "memgraph",
    Timeline: "timeline",
    HardwareProfile: "hardware_profile",
}

_BUFFER_COLUMNS = ("id", "kind", "nbytes", "name", "payload", "offset", "gather")
_TENSOR_COLUMNS = ("id", "buffer", "dtype", "shape", "stride", "offset")
_TASK_COLUMNS = (
    "index", "op", "label", "args", "kwargs", "results", "reads", "writes", "touches",
    "flops", "moved_bytes", "workspace_bytes", "time_ns",
)  # fmt: skip
_NUM_MEASURED = 2  # the last columns of a task are costs, which a fingerprint leaves out
_INPUT_COLUMNS = ("position", "tensor")
_OUTPUT_COLUMNS = ("tensor", "position", "host")
_CALL_COLUMNS = ("name", "class_name", "depth", "begin", "end")
_NODE_COLUMNS = ("id", "kind", "buffer", "task", "offset", "nbytes")
_EDGE_COLUMNS = ("before", "after", "kind")
_RESIDENCY_COLUMNS = ("buffer", "offset", "nbytes")
_SLOT_COLUMNS = ("buffer", "offset")
_SPAN_COLUMNS = ("node", "lane", "start_ns", "end_ns", "name")

_TASKGRAPH_FIELDS = (
    "name", "num_batches", "versions", "buffers", "tensors", "tasks", "inputs", "outputs", "calls",
)  # fmt: skip
_MEMGRAPH_FIELDS = (
    "taskgraph", "fingerprint", "versions", "policy", "arena_bytes", "alignment", "host_bytes",
    "entry", "exit", "host_slots", "nodes", "edges",
)  # fmt: skip
_TIMELINE_COUNTS = (
    "total_ns", "compute_ns", "transfer_ns", "stall_ns", "peak_bytes", "lower_bound_ns",
)  # fmt: skip
_PROFILE_RATES = ("h2d_bytes_per_s", "d2h_bytes_per_s", "memory_bytes_per_s")
_PROFILE_COUNTS = ("capacity_bytes", "launch_ns", "transfer_latency_ns")

_BUFFER_KINDS = {kind.value: kind for kind in BufferKind}
_NODE_KINDS = {kind.value: kind for kind in NodeKind}
_EDGE_KINDS = {kind.value: kind for kind in EdgeKind}
_LANES = {lane.value: lane for lane in Lane}
_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


# --- text ------------------------------------------------------------------------------------


def dumps(obj: Encodable) -> str:
    """Return the one JSON text of an object.

    Raises:
        InvalidPlanError: Something in the object has no place in the form: an id that is not the
            position, or a task's argument of another type than `Task` names.
    """
    if isinstance(obj, TaskGraph):
        fields = _taskgraph_fields(obj)
    elif isinstance(obj, MemGraph):
        fields = _memgraph_fields(obj)
    elif isinstance(obj, Timeline):
        fields = _timeline_fields(obj)
    else:
        fields = _profile_fields(obj)
    return _document(_KINDS[type(obj)], fields)


@overload
def loads(text: str) -> Standalone: ...
@overload
def loads(text: str, expect: type[_T]) -> _T: ...
def loads(text: str, expect: type[Any] | None = None) -> Standalone:
    """Return the object that a JSON text stands for.

    Args:
        text: What `dumps` wrote.
        expect: The type it must have; by default whatever the text says, except a memgraph.

    Raises:
        InvalidPlanError: The text is not JSON, of another kind or format version, or something in
            it is missing, superfluous, of the wrong type or out of range.
    """
    document = _parse(text)
    readers: dict[str, Callable[[dict[str, Any]], Standalone]] = {
        "taskgraph": _read_taskgraph,
        "timeline": _read_timeline,
        "hardware_profile": _read_profile,
    }
    kind = _kind_of(document, tuple(readers) if expect is None else (_KINDS[expect],))
    return readers[kind](document)


def loads_memgraph(text: str, graph: TaskGraph) -> MemGraph:
    """Return the memgraph that a JSON text stands for, on the taskgraph that it was made for.

    Its form is verified here; whether it is a right plan is for the checker to say.

    Raises:
        InvalidPlanError: As for `loads`; or the memgraph was made for another taskgraph, or with
            other versions.
    """
    document = _parse(text)
    _kind_of(document, (_KINDS[MemGraph],))
    return _read_memgraph(document, graph)


def fingerprint(graph: TaskGraph) -> str:
    """Return the SHA-256 of what a plan depends on, as hexadecimal digits.

    That is all of the taskgraph but its versions and the measured costs, which may differ from run
    to run.
    """
    text = _document("taskgraph", _taskgraph_fields(graph, only_identity=True))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


# --- files -----------------------------------------------------------------------------------


def save(obj: Encodable, path: str | os.PathLike[str]) -> None:
    """Write an object to a file, all of it or nothing.

    Raises:
        ConfigError: The file cannot be written.
        InvalidPlanError: As for `dumps`.
    """
    write_text(dumps(obj), path)


@overload
def load(path: str | os.PathLike[str]) -> Standalone: ...
@overload
def load(path: str | os.PathLike[str], expect: type[_T]) -> _T: ...
def load(path: str | os.PathLike[str], expect: type[Any] | None = None) -> Standalone:
    """Read an object from a file; see `loads`.

    Raises:
        ConfigError: The file cannot be read.
        InvalidPlanError: As for `loads`; the message begins with the path.
    """
    text = _read_text(path)
    try:
        return loads(text) if expect is None else loads(text, expect)
    except InvalidPlanError as error:
        raise InvalidPlanError(f"{os.fspath(path)}: {error}") from error


def load_memgraph(path: str | os.PathLike[str], graph: TaskGraph) -> MemGraph:
    """Read a memgraph from a file; see `loads_memgraph`.

    Raises:
        ConfigError: The file cannot be read.
        InvalidPlanError: As for `loads_memgraph`; the message begins with the path.
    """
    text = _read_text(path)
    try:
        return loads_memgraph(text, graph)
    except InvalidPlanError as error:
        raise InvalidPlanError(f"{os.fspath(path)}: {error}") from error


def write_text(text: str, path: str | os.PathLike[str]) -> None:
    """Write a file so that nobody, whatever happens, finds half of it.

    Raises:
        ConfigError: The file cannot be written; what was there before is untouched.
    """
    target = Path(path)
    # In the same folder, because a rename is atomic only within one file system.
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with open(temporary, "xb") as file:
                file.write(text.encode("utf-8"))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {os.fspath(path)}: {error}") from error


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        raw = Path(path).read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ConfigError(f"cannot read {os.fspath(path)}: {error}") from error
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPlanError(f"{os.fspath(path)}: not UTF-8 text: {error}") from error


# --- writing ---------------------------------------------------------------------------------

# Keys come in a fixed order and ASCII is enough: the same object gives the same bytes anywhere.
_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

_Fields: TypeAlias = list[tuple[str, str]]  # name, JSON text


def _document(kind: str, fields: _Fields) -> str:
    header = [("kind", _json(kind)), ("format", _json(FORMAT_VERSION))]
    lines = [f"{_json(name)}: {text}" for name, text in header + fields]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _table(columns: Sequence[str], rows: Iterable[str]) -> str:
    body = ",\n".join(rows)
    return f'{{"columns":{_json(columns)},"rows":[' + (f"\n{body}\n]}}" if body else "]}")


def _taskgraph_fields(graph: TaskGraph, *, only_identity: bool = False) -> _Fields:
    _require_positions("buffer", [b.id for b in graph.buffers])
    _require_positions("tensor", [t.id for t in graph.tensors])
    _require_positions("task", [t.index for t in graph.tasks])
    columns = _TASK_COLUMNS[:-_NUM_MEASURED] if only_identity else _TASK_COLUMNS
    fields = [
        ("name", _json(graph.name)),
        ("num_batches", _json(graph.num_batches)),
        ("versions", _json(graph.versions)),
        (
            "buffers",
            _table(
                _BUFFER_COLUMNS,
                (
                    _json(
                        (
                            b.id,
                            b.kind.value,
                            b.nbytes,
                            b.name,
                            _base64(b.payload),
                            b.offset,
                            b.gather,
                        )
                    )
                    for b in graph.buffers
                ),
            ),
        ),
        (
            "tensors",
            _table(
                _TENSOR_COLUMNS,
                (
                    _json((t.id, t.buffer, t.dtype, t.shape, t.stride, t.offset))
                    for t in graph.tensors
                ),
            ),
        ),
        ("tasks", _table(columns, (_json(_task_row(t)[: len(columns)]) for t in graph.tasks))),
        (
            "inputs",
            _table(_INPUT_COLUMNS, (_json((i.position, i.tensor)) for i in graph.inputs)),
        ),
        (
            "outputs",
            _table(_OUTPUT_COLUMNS, (_json((o.tensor, o.position, o.host)) for o in graph.outputs)),
        ),
        (
            "calls",
            _table(
                _CALL_COLUMNS,
                (_json((c.name, c.class_name, c.depth, c.begin, c.end)) for c in graph.calls),
            ),
        ),
    ]
    return [f for f in fields if f[0] != "versions"] if only_identity else fields


def _task_row(task: Task) -> tuple[Any, ...]:
    try:
        args = [_plain(value) for value in task.args]
        kwargs = [(name, _plain(value)) for name, value in task.kwargs]
    except TypeError as error:
        raise InvalidPlanError(f"{task.where}: {error}") from error
    return (
        task.index, task.op, task.label, args, kwargs, task.results, task.reads, task.writes,
        task.touches, task.flops, task.moved_bytes, task.workspace_bytes, task.time_ns,
    )  # fmt: skip


def _plain(value: Any) -> Any:
    """Return a task's argument in terms of JSON; see [Note: the form]."""
    kind = type(value)  # not isinstance: a subclass would come back as something else
    if value is None or kind in (bool, int, str):
        return value
    if kind is Ref:
        return {"ref": value.tensor}
    if kind is tuple:
        return [_plain(v) for v in value]
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is Symbol:
        return {"symbol": [value.kind, value.name]}
    if kind is bytes:
        return {"bytes": _base64(value)}
    raise TypeError(
        f"an argument of type {kind.__name__} cannot be written down; arguments are nested tuples "
        f"of Ref, Symbol, None, bool, int, float, str and bytes"
    )


def _base64(value: bytes | None) -> str | None:
    return None if value is None else base64.b64encode(value).decode("ascii")


def _memgraph_fields(memgraph: MemGraph) -> _Fields:
    _require_positions("node", [n.id for n in memgraph.nodes])
    graph = memgraph.graph
    return [
        ("taskgraph", _json(graph.name)),
        ("fingerprint", _json(fingerprint(graph))),
        ("versions", _json(graph.versions)),
        ("policy", _json(memgraph.policy)),
        ("arena_bytes", _json(memgraph.arena_bytes)),
        ("alignment", _json(memgraph.alignment)),
        ("host_bytes", _json(memgraph.host_bytes)),
        ("entry", _table(_RESIDENCY_COLUMNS, map(_residency_row, memgraph.entry))),
        ("exit", _table(_RESIDENCY_COLUMNS, map(_residency_row, memgraph.exit))),
        ("host_slots", _table(_SLOT_COLUMNS, map(_json, memgraph.host_slots))),
        ("nodes", _table(_NODE_COLUMNS, map(_node_row, memgraph.nodes))),
        (
            "edges",
            _table(
                _EDGE_COLUMNS,
                (f'[{e.before},{e.after},"{e.kind.value}"]' for e in memgraph.edges),
            ),
        ),
    ]


def _residency_row(residency: Residency) -> str:
    return _json((residency.buffer, residency.extent.offset, residency.extent.nbytes))


def _node_row(node: Node) -> str:
    offset, nbytes = (None, None) if not node.extent else (node.extent.offset, node.extent.nbytes)
    return _json((node.id, node.kind.value, node.buffer, node.task, offset, nbytes))


def _timeline_fields(timeline: Timeline) -> _Fields:
    rows = (_json((s.node, s.lane.value, s.start_ns, s.end_ns, s.name)) for s in timeline.spans)
    counts = [(name, _json(getattr(timeline, name))) for name in _TIMELINE_COUNTS]
    return [*counts, ("spans", _table(_SPAN_COLUMNS, rows))]


def _profile_fields(profile: HardwareProfile) -> _Fields:
    rates = {name: float(getattr(profile, name)) for name in _PROFILE_RATES}
    flops = {name: float(rate) for name, rate in sorted(profile.flops_per_s.items())}
    if not all(map(math.isfinite, [*rates.values(), *flops.values()])):
        raise InvalidPlanError(f"hardware profile {profile.name!r}: a rate is not finite")
    return [
        ("name", _json(profile.name)),
        ("source", _json(profile.source)),
        *((name, _json(getattr(profile, name))) for name in _PROFILE_COUNTS),
        *((name, _json(rate)) for name, rate in rates.items()),
        ("flops_per_s", _json(flops)),
    ]


def _require_positions(what: str, ids: list[int]) -> None:
    for position, found in enumerate(ids):
        if found != position:
            raise InvalidPlanError(f"{what} at position {position} has id {found}; ids must match")


# --- reading ---------------------------------------------------------------------------------


def _parse(text: str) -> dict[str, Any]:
    """Read JSON proper: one object, no repeated keys, no NaN."""
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise InvalidPlanError("corrupt JSON: nested too deeply") from error
    except ValueError as error:
        raise InvalidPlanError(f"corrupt JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidPlanError(f"expected a JSON object, found {_type_of(document)}")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key is repeated in an object with the keys {[k for k, _ in pairs]}")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _kind_of(document: dict[str, Any], wanted: tuple[str, ...]) -> str:
    """Verify kind and format version, take them out of the document and return the kind."""
    for field in ("kind", "format"):
        if field not in document:
            raise InvalidPlanError(f"field {field!r} is missing: not a file of ds_finepage")
    kind, version = document.pop("kind"), document.pop("format")
    if not isinstance(kind, str) or kind not in wanted:
        hint = ""
        if kind == _KINDS[MemGraph]:
            hint = "; a memgraph is read together with its taskgraph, by load_memgraph"
        raise InvalidPlanError(f"kind is {kind!r}; expected {' or '.join(wanted)}{hint}")
    if type(version) is not int or version != FORMAT_VERSION:
        raise InvalidPlanError(
            f"{kind} has format version {version!r}; this version of ds_finepage reads "
            f"{FORMAT_VERSION}. Make the file anew"
        )
    return kind


def _read_taskgraph(document: dict[str, Any]) -> TaskGraph:
    _require_keys(document, _TASKGRAPH_FIELDS, "")
    buffer_rows = _rows(document, "buffers", _BUFFER_COLUMNS)
    tensor_rows = _rows(document, "tensors", _TENSOR_COLUMNS)
    task_rows = _rows(document, "tasks", _TASK_COLUMNS)
    num_buffers, num_tensors = len(buffer_rows), len(tensor_rows)
    return TaskGraph(
        name=_text(document["name"], "name"),
        versions=_versions(document["versions"]),
        buffers=tuple(_buffer(i, row, num_tensors) for i, row in enumerate(buffer_rows)),
        tensors=tuple(_tensor(i, row, num_buffers) for i, row in enumerate(tensor_rows)),
        tasks=tuple(_task(i, row, num_buffers, num_tensors) for i, row in enumerate(task_rows)),
        inputs=tuple(
            GraphInput(
                _count(row[0], f"inputs[{i}].position"),
                _id(row[1], f"inputs[{i}].tensor", num_tensors),
            )
            for i, row in enumerate(_rows(document, "inputs", _INPUT_COLUMNS))
        ),
        outputs=tuple(
            _output(i, row, num_tensors)
            for i, row in enumerate(_rows(document, "outputs", _OUTPUT_COLUMNS))
        ),
        calls=tuple(
            _call(i, row, len(task_rows))
            for i, row in enumerate(_rows(document, "calls", _CALL_COLUMNS))
        ),
        num_batches=_count(document["num_batches"], "num_batches"),
    )


def _call(position: int, row: list[Any], num_tasks: int) -> ModuleCall:
    where = f"calls[{position}]"
    name, class_name, depth, begin, end = row
    found = ModuleCall(
        name=_text(name, f"{where}.name"),
        class_name=_text(class_name, f"{where}.class_name"),
        depth=_count(depth, f"{where}.depth"),
        begin=_count(begin, f"{where}.begin"),
        end=_count(end, f"{where}.end"),
    )
    if not found.begin <= found.end <= num_tasks:
        raise InvalidPlanError(
            f"{where} runs tasks [{found.begin}, {found.end}), not inside 0..{num_tasks}"
        )
    return found


def _buffer(position: int, row: list[Any], num_tensors: int) -> Buffer:
    where = f"buffers[{position}]"
    id_, kind, nbytes, name, payload, offset, gather = row
    return Buffer(
        id=_position(id_, where, position),
        kind=_member(kind, f"{where}.kind", _BUFFER_KINDS),
        nbytes=_count(nbytes, f"{where}.nbytes"),
        name=_text(name, f"{where}.name"),
        payload=None if payload is None else _bytes(payload, f"{where}.payload"),
        offset=_count(offset, f"{where}.offset"),
        gather=None if gather is None else _id(gather, f"{where}.gather", num_tensors),
    )


def _tensor(position: int, row: list[Any], num_buffers: int) -> TensorView:
    where = f"tensors[{position}]"
    id_, buffer, dtype, shape, stride, offset = row
    view = TensorView(
        id=_position(id_, where, position),
        buffer=_id(buffer, f"{where}.buffer", num_buffers),
        dtype=_text(dtype, f"{where}.dtype"),
        shape=_counts(shape, f"{where}.shape"),
        stride=_counts(stride, f"{where}.stride"),
        offset=_count(offset, f"{where}.offset"),
    )
    if len(view.shape) != len(view.stride):
        _wrong(where, f"has {len(view.shape)} sizes but {len(view.stride)} strides")
    return view


def _task(position: int, row: list[Any], num_buffers: int, num_tensors: int) -> Task:
    where = f"tasks[{position}]"
    index, op, label, args, kwargs, results, reads, writes, touches, *costs = row
    flops, moved_bytes, workspace_bytes, time_ns = costs
    named = []
    for pair in _list(kwargs, f"{where}.kwargs"):
        if not isinstance(pair, list) or len(pair) != 2:
            _wrong(f"{where}.kwargs", f"holds {pair!r}, which is not a name and a value")
        name = _text(pair[0], f"{where}.kwargs")
        named.append((name, _value(pair[1], f"{where}.kwargs.{name}", num_tensors)))
    return Task(
        index=_position(index, where, position),
        op=_text(op, f"{where}.op"),
        label=_text(label, f"{where}.label"),
        args=tuple(_value(v, f"{where}.args", num_tensors) for v in _list(args, f"{where}.args")),
        kwargs=tuple(named),
        results=tuple(
            None if r is None else _id(r, f"{where}.results", num_tensors)
            for r in _list(results, f"{where}.results")
        ),
        reads=_buffer_ids(reads, f"{where}.reads", num_buffers),
        writes=_buffer_ids(writes, f"{where}.writes", num_buffers),
        touches=_buffer_ids(touches, f"{where}.touches", num_buffers),
        workspace_bytes=_count(workspace_bytes, f"{where}.workspace_bytes"),
        flops=_count(flops, f"{where}.flops"),
        moved_bytes=_count(moved_bytes, f"{where}.moved_bytes"),
        time_ns=None if time_ns is None else _count(time_ns, f"{where}.time_ns"),
    )


def _value(plain: Any, where: str, num_tensors: int) -> Any:
    """Return the task's argument that JSON stands for; see [Note: the form]."""
    if plain is None or isinstance(plain, (bool, int, str)):
        return plain
    if isinstance(plain, list):
        return tuple(_value(v, where, num_tensors) for v in plain)
    if isinstance(plain, float):
        return _finite(plain, where)
    if len(plain) == 1:
        ((tag, content),) = plain.items()
        if tag == "ref":
            return Ref(_id(content, where, num_tensors))
        if tag == "symbol" and isinstance(content, list) and len(content) == 2:
            return Symbol(_text(content[0], where), _text(content[1], where))
        if tag == "float" and isinstance(content, str) and content in _NON_FINITE:
            return _NON_FINITE[content]
        if tag == "bytes":
            return _bytes(content, where)
    _wrong(where, f"holds {plain!r}, which stands for nothing")


def _output(position: int, row: list[Any], num_tensors: int) -> GraphOutput:
    where = f"outputs[{position}]"
    tensor, argument, host = row
    if sum(value is not None for value in row) > 1:
        _wrong(where, f"is more than one of {', '.join(_OUTPUT_COLUMNS)}: {row!r}")
    return GraphOutput(
        tensor=None if tensor is None else _id(tensor, f"{where}.tensor", num_tensors),
        position=None if argument is None else _count(argument, f"{where}.position"),
        host=None if host is None else _count(host, f"{where}.host"),
    )


def _read_memgraph(document: dict[str, Any], graph: TaskGraph) -> MemGraph:
    _require_keys(document, _MEMGRAPH_FIELDS, "")
    _require_same_graph(document, graph)
    num_buffers, num_tasks = len(graph.buffers), len(graph.tasks)
    node_rows = _rows(document, "nodes", _NODE_COLUMNS)
    num_nodes = len(node_rows)
    return MemGraph(
        graph=graph,
        policy=_text(document["policy"], "policy"),
        arena_bytes=_count(document["arena_bytes"], "arena_bytes"),
        alignment=_count(document["alignment"], "alignment"),
        nodes=tuple(_node(i, row, num_buffers, num_tasks) for i, row in enumerate(node_rows)),
        edges=tuple(
            Edge(
                _id(before, f"edges[{i}].before", num_nodes),
                _id(after, f"edges[{i}].after", num_nodes),
                _member(kind, f"edges[{i}].kind", _EDGE_KINDS),
            )
            for i, (before, after, kind) in enumerate(_rows(document, "edges", _EDGE_COLUMNS))
        ),
        entry=_residencies(document, "entry", num_buffers),
        exit=_residencies(document, "exit", num_buffers),
        host_slots=tuple(
            (
                _id(row[0], f"host_slots[{i}].buffer", num_buffers),
                _count(row[1], f"host_slots[{i}].offset"),
            )
            for i, row in enumerate(_rows(document, "host_slots", _SLOT_COLUMNS))
        ),
        host_bytes=_count(document["host_bytes"], "host_bytes"),
    )


def _require_same_graph(document: dict[str, Any], graph: TaskGraph) -> None:
    name = _text(document["taskgraph"], "taskgraph")
    made_for = _text(document["fingerprint"], "fingerprint")
    made_with = _versions(document["versions"])
    at_hand = fingerprint(graph)
    if made_for != at_hand or made_with != graph.versions:
        raise InvalidPlanError(
            f"a plan file of another model or version: it was made for "
            f"{_identity(name, made_for, made_with)}, but the model at hand is "
            f"{_identity(graph.name, at_hand, graph.versions)}. Plan again, or load the model and "
            f"the versions that the file was made for"
        )


def _identity(name: str, digest: str, versions: tuple[tuple[str, str], ...]) -> str:
    made_with = ", ".join(f"{package} {version}" for package, version in versions)
    return f"{name!r} (fingerprint {digest[:12]}, {made_with or 'no versions'})"


def _node(position: int, row: list[Any], num_buffers: int, num_tasks: int) -> Node:
    where = f"nodes[{position}]"
    id_, kind, buffer, task, offset, nbytes = row
    if (offset is None) != (nbytes is None):
        _wrong(where, "has one of offset and nbytes without the other")
    return Node(
        id=_position(id_, where, position),
        kind=_member(kind, f"{where}.kind", _NODE_KINDS),
        buffer=None if buffer is None else _id(buffer, f"{where}.buffer", num_buffers),
        task=None if task is None else _id(task, f"{where}.task", num_tasks),
        extent=None if offset is None else _extent(offset, nbytes, where),
    )


def _residencies(document: dict[str, Any], field: str, num_buffers: int) -> tuple[Residency, ...]:
    return tuple(
        Residency(
            _id(buffer, f"{field}[{i}].buffer", num_buffers),
            _extent(offset, nbytes, f"{field}[{i}]"),
        )
        for i, (buffer, offset, nbytes) in enumerate(_rows(document, field, _RESIDENCY_COLUMNS))
    )


def _extent(offset: Any, nbytes: Any, where: str) -> Extent:
    return Extent(_count(offset, f"{where}.offset"), _count(nbytes, f"{where}.nbytes"))


def _read_timeline(document: dict[str, Any]) -> Timeline:
    _require_keys(document, (*_TIMELINE_COUNTS, "spans"), "")
    spans = []
    for i, (node, lane, start_ns, end_ns, name) in enumerate(
        _rows(document, "spans", _SPAN_COLUMNS)
    ):
        where = f"spans[{i}]"
        span = Span(
            node=_count(node, f"{where}.node"),
            lane=_member(lane, f"{where}.lane", _LANES),
            start_ns=_count(start_ns, f"{where}.start_ns"),
            end_ns=_count(end_ns, f"{where}.end_ns"),
            name=_text(name, f"{where}.name"),
        )
        if span.end_ns < span.start_ns:
            _wrong(where, f"ends at {span.end_ns} ns, before it starts at {span.start_ns} ns")
        spans.append(span)
    counts = {name: _count(document[name], name) for name in _TIMELINE_COUNTS}
    return Timeline(spans=tuple(spans), **counts)


def _read_profile(document: dict[str, Any]) -> HardwareProfile:
    fields = ("name", "source", *_PROFILE_COUNTS, *_PROFILE_RATES, "flops_per_s")
    _require_keys(document, fields, "")
    flops = document["flops_per_s"]
    if not isinstance(flops, dict):
        _wrong("flops_per_s", f"must be an object, not {_type_of(flops)}")
    figures: dict[str, Any] = {name: _rate(document[name], name) for name in _PROFILE_RATES}
    figures |= {name: _integer(document[name], name) for name in _PROFILE_COUNTS}
    return HardwareProfile(
        name=_text(document["name"], "name"),
        source=_text(document["source"], "source"),
        flops_per_s={name: _rate(rate, f"flops_per_s.{name}") for name, rate in flops.items()},
        **figures,
    )


# --- the smallest parts: each raises where a value is not what its place calls for -------------


def _wrong(where: str, message: str) -> NoReturn:
    raise InvalidPlanError(f"{where} {message}")


def _type_of(value: Any) -> str:
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else f"the number {value!r}")


def _require_keys(found: dict[str, Any], wanted: Sequence[str], where: str) -> None:
    missing = [name for name in wanted if name not in found]
    unknown = [name for name in found if name not in wanted]
    if missing or unknown:
        parts = [f"missing: {', '.join(missing)}"] if missing else []
        parts += [f"unknown: {', '.join(unknown)}"] if unknown else []
        raise InvalidPlanError(f"{where or 'the file'} has wrong fields ({'; '.join(parts)})")


def _rows(document: dict[str, Any], field: str, columns: tuple[str, ...]) -> list[list[Any]]:
    table = document[field]
    if not isinstance(table, dict):
        _wrong(field, f"must be an object, not {_type_of(table)}")
    _require_keys(table, ("columns", "rows"), field)
    if table["columns"] != list(columns):
        _wrong(field, f"has the columns {table['columns']!r}; expected {list(columns)!r}")
    rows = _list(table["rows"], f"{field}.rows")
    for position, row in enumerate(rows):
        if not isinstance(row, list):
            _wrong(f"{field}[{position}]", f"must be an array, not {_type_of(row)}")
        if len(row) != len(columns):
            _wrong(f"{field}[{position}]", f"has {len(row)} values; expected {len(columns)}")
    return rows


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        _wrong(where, f"must be an array, not {_type_of(value)}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        _wrong(where, f"must be a string, not {_type_of(value)}")
    return value


def _integer(value: Any, where: str) -> int:
    if type(value) is not int:
        _wrong(where, f"must be an integer, not {_type_of(value)}")
    return value


def _count(value: Any, where: str) -> int:
    if type(value) is not int:
        _wrong(where, f"must be an integer, not {_type_of(value)}")
    if value < 0:
        _wrong(where, f"is {value}; it must not be negative")
    return value


def _counts(value: Any, where: str) -> tuple[int, ...]:
    return tuple(_count(v, where) for v in _list(value, where))


def _id(value: Any, where: str, num_ids: int) -> int:
    if type(value) is not int or not 0 <= value < num_ids:
        _wrong(where, f"is {value!r}, which is no id out of {num_ids}")
    return value


def _buffer_ids(value: Any, where: str, num_buffers: int) -> tuple[int, ...]:
    ids = tuple(_id(v, where, num_buffers) for v in _list(value, where))
    if any(after <= before for before, after in zip(ids, ids[1:], strict=False)):
        _wrong(where, f"must be sorted and free of repeats: {ids}")
    return ids


def _position(value: Any, where: str, position: int) -> int:
    if type(value) is not int or value != position:
        _wrong(where, f"has id {value!r}; ids must be positions")
    return position


def _finite(value: float, where: str) -> float:
    if not math.isfinite(value):  # such as 1e999
        _wrong(where, "is too large for a float")
    return value


def _rate(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        _wrong(where, f"must be a number, not {_type_of(value)}")
    try:
        return _finite(float(value), where)
    except OverflowError:
        _wrong(where, "is too large for a float")


_M = TypeVar("_M")


def _member(value: Any, where: str, members: dict[str, _M]) -> _M:
    if not isinstance(value, str) or value not in members:
        _wrong(where, f"is {value!r}; expected one of {', '.join(members)}")
    return members[value]


def _bytes(value: Any, where: str) -> bytes:
    try:
        return base64.b64decode(_text(value, where), validate=True)
    except ValueError as error:
        raise InvalidPlanError(f"{where} is not base64: {error}") from error


def _versions(value: Any) -> tuple[tuple[str, str], ...]:
    found = []
    for pair in _list(value, "versions"):
        if not isinstance(pair, list) or len(pair) != 2:
            _wrong("versions", f"holds {pair!r}, which is not a name and a version")
        found.append((_text(pair[0], "versions"), _text(pair[1], "versions")))
    return tuple(found)
