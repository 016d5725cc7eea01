"""From plain data to the fields of a JSON document, in the one form there is."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

from ds_finepage.errors import InvalidPlanError
from ds_finepage.graph.codec_form import (
    BUFFER_COLUMNS,
    CALL_COLUMNS,
    EDGE_COLUMNS,
    FORMAT_VERSION,
    INPUT_COLUMNS,
    NODE_COLUMNS,
    NUM_MEASURED,
    OUTPUT_COLUMNS,
    PROFILE_COUNTS,
    PROFILE_RATES,
    RESIDENCY_COLUMNS,
    SLOT_COLUMNS,
    SPAN_COLUMNS,
    TASK_COLUMNS,
    TENSOR_COLUMNS,
    TIMELINE_COUNTS,
)
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph, Node, Residency
from ds_finepage.graph.taskgraph import Length, Ref, Symbol, Task, TaskGraph
from ds_finepage.graph.timeline import Timeline

# --- writing ---------------------------------------------------------------------------------

# Keys come in a fixed order and ASCII is enough: the same object gives the same bytes anywhere.
_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

_Fields: TypeAlias = list[tuple[str, str]]  # name, JSON text


def document_text(kind: str, fields: _Fields) -> str:
    """Return a whole document."""
    header = [("kind", _json(kind)), ("format", _json(FORMAT_VERSION))]
    lines = [f"{_json(name)}: {text}" for name, text in header + fields]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _table(columns: Sequence[str], rows: Iterable[str]) -> str:
    body = ",\n".join(rows)
    return f'{{"columns":{_json(columns)},"rows":[' + (f"\n{body}\n]}}" if body else "]}")


def taskgraph_fields(graph: TaskGraph, *, only_identity: bool = False) -> _Fields:
    """Return the fields of a taskgraph."""
    _require_positions("buffer", [b.id for b in graph.buffers])
    _require_positions("tensor", [t.id for t in graph.tensors])
    _require_positions("task", [t.index for t in graph.tasks])
    columns = TASK_COLUMNS[:-NUM_MEASURED] if only_identity else TASK_COLUMNS
    fields = [
        ("name", _json(graph.name)),
        ("num_batches", _json(graph.num_batches)),
        ("versions", _json(graph.versions)),
        (
            "buffers",
            _table(
                BUFFER_COLUMNS,
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
                TENSOR_COLUMNS,
                (
                    _json((t.id, t.buffer, t.dtype, t.shape, t.stride, t.offset))
                    for t in graph.tensors
                ),
            ),
        ),
        ("tasks", _table(columns, (_json(_task_row(t)[: len(columns)]) for t in graph.tasks))),
        (
            "inputs",
            _table(INPUT_COLUMNS, (_json((i.position, i.tensor)) for i in graph.inputs)),
        ),
        (
            "outputs",
            _table(OUTPUT_COLUMNS, (_json((o.tensor, o.position, o.host)) for o in graph.outputs)),
        ),
        (
            "calls",
            _table(
                CALL_COLUMNS,
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
    if kind is Length:
        return int(value)  # a file is of one size
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


def memgraph_fields(memgraph: MemGraph) -> _Fields:
    """Return the fields of a memgraph."""
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
        ("entry", _table(RESIDENCY_COLUMNS, map(_residency_row, memgraph.entry))),
        ("exit", _table(RESIDENCY_COLUMNS, map(_residency_row, memgraph.exit))),
        ("host_slots", _table(SLOT_COLUMNS, map(_json, memgraph.host_slots))),
        ("routed", _json(memgraph.routed)),
        ("nodes", _table(NODE_COLUMNS, map(_node_row, memgraph.nodes))),
        (
            "edges",
            _table(
                EDGE_COLUMNS,
                (f'[{e.before},{e.after},"{e.kind.value}"]' for e in memgraph.edges),
            ),
        ),
    ]


def _residency_row(residency: Residency) -> str:
    return _json((residency.buffer, residency.extent.offset, residency.extent.nbytes))


def _node_row(node: Node) -> str:
    offset, nbytes = (None, None) if not node.extent else (node.extent.offset, node.extent.nbytes)
    return _json((node.id, node.kind.value, node.buffer, node.task, offset, nbytes))


def timeline_fields(timeline: Timeline) -> _Fields:
    """Return the fields of a timeline."""
    rows = (_json((s.node, s.lane.value, s.start_ns, s.end_ns, s.name)) for s in timeline.spans)
    counts = [(name, _json(getattr(timeline, name))) for name in TIMELINE_COUNTS]
    return [*counts, ("spans", _table(SPAN_COLUMNS, rows))]


def profile_fields(profile: HardwareProfile) -> _Fields:
    """Return the fields of a hardware profile."""
    rates = {name: float(getattr(profile, name)) for name in PROFILE_RATES}
    flops = {name: float(rate) for name, rate in sorted(profile.flops_per_s.items())}
    if not all(map(math.isfinite, [*rates.values(), *flops.values()])):
        raise InvalidPlanError(f"hardware profile {profile.name!r}: a rate is not finite")
    return [
        ("name", _json(profile.name)),
        ("source", _json(profile.source)),
        *((name, _json(getattr(profile, name))) for name in PROFILE_COUNTS),
        *((name, _json(rate)) for name, rate in rates.items()),
        ("flops_per_s", _json(flops)),
    ]


def _require_positions(what: str, ids: list[int]) -> None:
    for position, found in enumerate(ids):
        if found != position:
            raise InvalidPlanError(f"{what} at position {position} has id {found}; ids must match")


def fingerprint(graph: TaskGraph) -> str:
    """Return the SHA-256 of what a plan depends on, as hexadecimal digits.

    That is all of the taskgraph but its versions and the measured costs, which may differ from run
    to run.
    """
    text = document_text("taskgraph", taskgraph_fields(graph, only_identity=True))
    return hashlib.sha256(text.encode("ascii")).hexdigest()
