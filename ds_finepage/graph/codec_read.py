"""From parsed JSON to plain data; whatever is not exactly as expected is refused."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from ds_finepage.errors import InvalidPlanError
from ds_finepage.graph.codec_form import (
    BUFFER_COLUMNS,
    BUFFER_KINDS,
    CALL_COLUMNS,
    EDGE_COLUMNS,
    EDGE_KINDS,
    FORMAT_VERSION,
    INPUT_COLUMNS,
    KINDS,
    LANES,
    MEMGRAPH_FIELDS,
    NODE_COLUMNS,
    NODE_KINDS,
    NON_FINITE,
    OUTPUT_COLUMNS,
    PROFILE_COUNTS,
    PROFILE_RATES,
    RESIDENCY_COLUMNS,
    SLOT_COLUMNS,
    SPAN_COLUMNS,
    TASK_COLUMNS,
    TASKGRAPH_FIELDS,
    TENSOR_COLUMNS,
    TIMELINE_COUNTS,
)
from ds_finepage.graph.codec_parts import (
    as_buffer_ids,
    as_bytes,
    as_count,
    as_counts,
    as_finite,
    as_id,
    as_integer,
    as_list,
    as_member,
    as_rate,
    as_text,
    as_versions,
    refuse,
    require_keys,
    require_position,
    rows_of,
    type_name,
)
from ds_finepage.graph.codec_write import fingerprint
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import Edge, Extent, MemGraph, Node, Residency
from ds_finepage.graph.taskgraph import (
    Buffer,
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

# --- reading ---------------------------------------------------------------------------------


def parse_document(text: str) -> dict[str, Any]:
    """Read JSON proper: one object, no repeated keys, no NaN."""
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise InvalidPlanError("corrupt JSON: nested too deeply") from error
    except ValueError as error:
        raise InvalidPlanError(f"corrupt JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidPlanError(f"expected a JSON object, found {type_name(document)}")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key is repeated in an object with the keys {[k for k, _ in pairs]}")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def kind_of(document: dict[str, Any], wanted: tuple[str, ...]) -> str:
    """Verify kind and format version, take them out of the document and return the kind."""
    for field in ("kind", "format"):
        if field not in document:
            raise InvalidPlanError(f"field {field!r} is missing: not a file of ds_finepage")
    kind, version = document.pop("kind"), document.pop("format")
    if not isinstance(kind, str) or kind not in wanted:
        hint = ""
        if kind == KINDS[MemGraph]:
            hint = "; a memgraph is read together with its taskgraph, by load_memgraph"
        raise InvalidPlanError(f"kind is {kind!r}; expected {' or '.join(wanted)}{hint}")
    if type(version) is not int or version != FORMAT_VERSION:
        raise InvalidPlanError(
            f"{kind} has format version {version!r}; this version of ds_finepage reads "
            f"{FORMAT_VERSION}. Make the file anew"
        )
    return kind


def read_taskgraph(document: dict[str, Any]) -> TaskGraph:
    """Build a taskgraph."""
    require_keys(document, TASKGRAPH_FIELDS, "")
    buffer_rows = rows_of(document, "buffers", BUFFER_COLUMNS)
    tensor_rows = rows_of(document, "tensors", TENSOR_COLUMNS)
    task_rows = rows_of(document, "tasks", TASK_COLUMNS)
    num_buffers, num_tensors = len(buffer_rows), len(tensor_rows)
    return TaskGraph(
        name=as_text(document["name"], "name"),
        versions=as_versions(document["versions"]),
        buffers=tuple(_buffer(i, row, num_tensors) for i, row in enumerate(buffer_rows)),
        tensors=tuple(_tensor(i, row, num_buffers) for i, row in enumerate(tensor_rows)),
        tasks=tuple(_task(i, row, num_buffers, num_tensors) for i, row in enumerate(task_rows)),
        inputs=tuple(
            GraphInput(
                as_count(row[0], f"inputs[{i}].position"),
                as_id(row[1], f"inputs[{i}].tensor", num_tensors),
            )
            for i, row in enumerate(rows_of(document, "inputs", INPUT_COLUMNS))
        ),
        outputs=tuple(
            _output(i, row, num_tensors)
            for i, row in enumerate(rows_of(document, "outputs", OUTPUT_COLUMNS))
        ),
        calls=tuple(
            _call(i, row, len(task_rows))
            for i, row in enumerate(rows_of(document, "calls", CALL_COLUMNS))
        ),
        num_batches=as_count(document["num_batches"], "num_batches"),
    )


def _call(position: int, row: list[Any], num_tasks: int) -> ModuleCall:
    where = f"calls[{position}]"
    name, class_name, depth, begin, end = row
    found = ModuleCall(
        name=as_text(name, f"{where}.name"),
        class_name=as_text(class_name, f"{where}.class_name"),
        depth=as_count(depth, f"{where}.depth"),
        begin=as_count(begin, f"{where}.begin"),
        end=as_count(end, f"{where}.end"),
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
        id=require_position(id_, where, position),
        kind=as_member(kind, f"{where}.kind", BUFFER_KINDS),
        nbytes=as_count(nbytes, f"{where}.nbytes"),
        name=as_text(name, f"{where}.name"),
        payload=None if payload is None else as_bytes(payload, f"{where}.payload"),
        offset=as_count(offset, f"{where}.offset"),
        gather=None if gather is None else as_id(gather, f"{where}.gather", num_tensors),
    )


def _tensor(position: int, row: list[Any], num_buffers: int) -> TensorView:
    where = f"tensors[{position}]"
    id_, buffer, dtype, shape, stride, offset = row
    view = TensorView(
        id=require_position(id_, where, position),
        buffer=as_id(buffer, f"{where}.buffer", num_buffers),
        dtype=as_text(dtype, f"{where}.dtype"),
        shape=as_counts(shape, f"{where}.shape"),
        stride=as_counts(stride, f"{where}.stride"),
        offset=as_count(offset, f"{where}.offset"),
    )
    if len(view.shape) != len(view.stride):
        refuse(where, f"has {len(view.shape)} sizes but {len(view.stride)} strides")
    return view


def _task(position: int, row: list[Any], num_buffers: int, num_tensors: int) -> Task:
    where = f"tasks[{position}]"
    index, op, label, args, kwargs, results, reads, writes, touches, *costs = row
    flops, moved_bytes, workspace_bytes, time_ns = costs
    named = []
    for pair in as_list(kwargs, f"{where}.kwargs"):
        if not isinstance(pair, list) or len(pair) != 2:
            refuse(f"{where}.kwargs", f"holds {pair!r}, which is not a name and a value")
        name = as_text(pair[0], f"{where}.kwargs")
        named.append((name, _value(pair[1], f"{where}.kwargs.{name}", num_tensors)))
    return Task(
        index=require_position(index, where, position),
        op=as_text(op, f"{where}.op"),
        label=as_text(label, f"{where}.label"),
        args=tuple(_value(v, f"{where}.args", num_tensors) for v in as_list(args, f"{where}.args")),
        kwargs=tuple(named),
        results=tuple(
            None if r is None else as_id(r, f"{where}.results", num_tensors)
            for r in as_list(results, f"{where}.results")
        ),
        reads=as_buffer_ids(reads, f"{where}.reads", num_buffers),
        writes=as_buffer_ids(writes, f"{where}.writes", num_buffers),
        touches=as_buffer_ids(touches, f"{where}.touches", num_buffers),
        workspace_bytes=as_count(workspace_bytes, f"{where}.workspace_bytes"),
        flops=as_count(flops, f"{where}.flops"),
        moved_bytes=as_count(moved_bytes, f"{where}.moved_bytes"),
        time_ns=None if time_ns is None else as_count(time_ns, f"{where}.time_ns"),
    )


def _value(plain: Any, where: str, num_tensors: int) -> Any:
    """Return the task's argument that JSON stands for; see [Note: the form]."""
    if plain is None or isinstance(plain, (bool, int, str)):
        return plain
    if isinstance(plain, list):
        return tuple(_value(v, where, num_tensors) for v in plain)
    if isinstance(plain, float):
        return as_finite(plain, where)
    if len(plain) == 1:
        ((tag, content),) = plain.items()
        if tag == "ref":
            return Ref(as_id(content, where, num_tensors))
        if tag == "symbol" and isinstance(content, list) and len(content) == 2:
            return Symbol(as_text(content[0], where), as_text(content[1], where))
        if tag == "float" and isinstance(content, str) and content in NON_FINITE:
            return NON_FINITE[content]
        if tag == "bytes":
            return as_bytes(content, where)
    refuse(where, f"holds {plain!r}, which stands for nothing")


def _output(position: int, row: list[Any], num_tensors: int) -> GraphOutput:
    where = f"outputs[{position}]"
    tensor, argument, host = row
    if sum(value is not None for value in row) > 1:
        refuse(where, f"is more than one of {', '.join(OUTPUT_COLUMNS)}: {row!r}")
    return GraphOutput(
        tensor=None if tensor is None else as_id(tensor, f"{where}.tensor", num_tensors),
        position=None if argument is None else as_count(argument, f"{where}.position"),
        host=None if host is None else as_count(host, f"{where}.host"),
    )


def read_memgraph(document: dict[str, Any], graph: TaskGraph) -> MemGraph:
    """Build a memgraph of the taskgraph that it was made for."""
    document = {"routed": [], **document}  # plans of before had none
    require_keys(document, MEMGRAPH_FIELDS, "")
    _require_same_graph(document, graph)
    num_buffers, num_tasks = len(graph.buffers), len(graph.tasks)
    node_rows = rows_of(document, "nodes", NODE_COLUMNS)
    num_nodes = len(node_rows)
    return MemGraph(
        graph=graph,
        policy=as_text(document["policy"], "policy"),
        arena_bytes=as_count(document["arena_bytes"], "arena_bytes"),
        alignment=as_count(document["alignment"], "alignment"),
        nodes=tuple(_node(i, row, num_buffers, num_tasks) for i, row in enumerate(node_rows)),
        edges=tuple(
            Edge(
                as_id(before, f"edges[{i}].before", num_nodes),
                as_id(after, f"edges[{i}].after", num_nodes),
                as_member(kind, f"edges[{i}].kind", EDGE_KINDS),
            )
            for i, (before, after, kind) in enumerate(rows_of(document, "edges", EDGE_COLUMNS))
        ),
        entry=_residencies(document, "entry", num_buffers),
        exit=_residencies(document, "exit", num_buffers),
        host_slots=tuple(
            (
                as_id(row[0], f"host_slots[{i}].buffer", num_buffers),
                as_count(row[1], f"host_slots[{i}].offset"),
            )
            for i, row in enumerate(rows_of(document, "host_slots", SLOT_COLUMNS))
        ),
        host_bytes=as_count(document["host_bytes"], "host_bytes"),
        routed=as_buffer_ids(document["routed"], "routed", num_buffers),
    )


def _require_same_graph(document: dict[str, Any], graph: TaskGraph) -> None:
    name = as_text(document["taskgraph"], "taskgraph")
    made_for = as_text(document["fingerprint"], "fingerprint")
    made_with = as_versions(document["versions"])
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
        refuse(where, "has one of offset and nbytes without the other")
    return Node(
        id=require_position(id_, where, position),
        kind=as_member(kind, f"{where}.kind", NODE_KINDS),
        buffer=None if buffer is None else as_id(buffer, f"{where}.buffer", num_buffers),
        task=None if task is None else as_id(task, f"{where}.task", num_tasks),
        extent=None if offset is None else _extent(offset, nbytes, where),
    )


def _residencies(document: dict[str, Any], field: str, num_buffers: int) -> tuple[Residency, ...]:
    return tuple(
        Residency(
            as_id(buffer, f"{field}[{i}].buffer", num_buffers),
            _extent(offset, nbytes, f"{field}[{i}]"),
        )
        for i, (buffer, offset, nbytes) in enumerate(rows_of(document, field, RESIDENCY_COLUMNS))
    )


def _extent(offset: Any, nbytes: Any, where: str) -> Extent:
    return Extent(as_count(offset, f"{where}.offset"), as_count(nbytes, f"{where}.nbytes"))


def read_timeline(document: dict[str, Any]) -> Timeline:
    """Build a timeline."""
    require_keys(document, (*TIMELINE_COUNTS, "spans"), "")
    spans = []
    for i, (node, lane, start_ns, end_ns, name) in enumerate(
        rows_of(document, "spans", SPAN_COLUMNS)
    ):
        where = f"spans[{i}]"
        span = Span(
            node=as_count(node, f"{where}.node"),
            lane=as_member(lane, f"{where}.lane", LANES),
            start_ns=as_count(start_ns, f"{where}.start_ns"),
            end_ns=as_count(end_ns, f"{where}.end_ns"),
            name=as_text(name, f"{where}.name"),
        )
        if span.end_ns < span.start_ns:
            refuse(where, f"ends at {span.end_ns} ns, before it starts at {span.start_ns} ns")
        spans.append(span)
    counts = {name: as_count(document[name], name) for name in TIMELINE_COUNTS}
    return Timeline(spans=tuple(spans), **counts)


def read_profile(document: dict[str, Any]) -> HardwareProfile:
    """Build a hardware profile."""
    fields = ("name", "source", *PROFILE_COUNTS, *PROFILE_RATES, "flops_per_s")
    require_keys(document, fields, "")
    flops = document["flops_per_s"]
    if not isinstance(flops, dict):
        refuse("flops_per_s", f"must be an object, not {type_name(flops)}")
    figures: dict[str, Any] = {name: as_rate(document[name], name) for name in PROFILE_RATES}
    figures |= {name: as_integer(document[name], name) for name in PROFILE_COUNTS}
    return HardwareProfile(
        name=as_text(document["name"], "name"),
        source=as_text(document["source"], "source"),
        flops_per_s={name: as_rate(rate, f"flops_per_s.{name}") for name, rate in flops.items()},
        **figures,
    )
