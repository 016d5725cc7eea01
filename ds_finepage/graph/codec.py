"""Plain data as JSON files, and back without loss.

Writes and reads `TaskGraph`, `MemGraph`, `Timeline` and `HardwareProfile`. A file names its
``kind`` and the version of its ``format``; the other fields are those of the class. Equal objects
give equal bytes. Pydantic refuses fields that are missing, unknown or of another type; the checks
in here compare fields with each other.

A memgraph's file does not repeat the taskgraph. It holds the taskgraph's `fingerprint` and
versions, and is read together with the taskgraph that it was made for.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter, ge
from typing import Any, NoReturn, TypeAlias, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import PydanticSerializationError

from ds_finepage.errors import InvalidPlanError
from ds_finepage.files import read_file, write_file
from ds_finepage.graph.arguments import refs
from ds_finepage.graph.hardware import DETAILS, HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.graph.timeline import Timeline

Encodable: TypeAlias = TaskGraph | MemGraph | Timeline | HardwareProfile
Versions: TypeAlias = tuple[tuple[str, str], ...]
_T = TypeVar("_T", TaskGraph, Timeline, HardwareProfile)

_STRICT = ConfigDict(
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    ser_json_bytes="base64",
    val_json_bytes="base64",
)
_ADVICE = "Write the file again with this version of ds_finepage"


@dataclass(frozen=True, slots=True)
class _Form:
    """How objects of one class are written.

    Attributes:
        kind: The name of the class in the file.
        version: Raised with every change of the form. There is no reader for older versions.
        model: The fields of the file.
        rows: For each field that is a table: the fields of a row.
        sparse: Fields that are not written where they have these values.
    """

    kind: str
    version: int
    model: type[BaseModel]
    rows: dict[str, frozenset[str]]
    sparse: dict[str, Any]


def _form(
    cls: type[Encodable],
    kind: str,
    version: int,
    *,
    without: str = "",
    sparse: Collection[str] = (),
    **more: Any,
) -> _Form:
    """Derive a form from a dataclass.

    ``without`` names a field that the file does not have. It has the ``sparse`` ones only where
    they differ from their defaults. ``more`` are fields, with types, that the class has not.
    """
    hints = get_type_hints(cls, include_extras=True)
    types = {"kind": str, "format": int, **more}
    types |= {f.name: hints[f.name] for f in fields(cls) if f.name != without}
    rows = {}
    for name, hint in types.items():
        row = next(iter(get_args(hint)), None)
        if isinstance(row, type) and is_dataclass(row):
            rows[name] = frozenset(f.name for f in fields(row))
    defaults = {f.name: f.default for f in fields(cls) if f.name in sparse}
    columns: dict[str, Any] = {n: (hint, defaults.get(n, ...)) for n, hint in types.items()}
    model = create_model(cls.__name__, __config__=_STRICT, **columns)
    return _Form(kind, version, model, rows, {name: defaults[name] for name in sparse})


_MADE_FOR: dict[str, Any] = {"taskgraph": str, "fingerprint": str, "versions": Versions}
_FORMS: dict[type[Encodable], _Form] = {
    TaskGraph: _form(  # without symbols: a file has one size
        TaskGraph, "taskgraph", 4, without="symbols", sparse=("experts", "parted", "num_ranks")
    ),
    MemGraph: _form(MemGraph, "memgraph", 3, without="graph", **_MADE_FOR),
    Timeline: _form(Timeline, "timeline", 2),
    HardwareProfile: _form(HardwareProfile, "hardware_profile", 1, sparse=DETAILS),
}


# --- writing ---------------------------------------------------------------------------------


def dumps(obj: Encodable) -> str:
    """Return the one JSON text of an object.

    Raises:
        InvalidPlanError: A file cannot hold the object: an id is not the position, or a task's
            argument has another type than `Argument` names.
    """
    if isinstance(obj, MemGraph):
        _require_positions("nodes", [n.id for n in obj.nodes])
        graph = obj.graph
        return _text(
            obj, taskgraph=graph.name, fingerprint=fingerprint(graph), versions=graph.versions
        )
    if isinstance(obj, TaskGraph):
        _require_graph_positions(obj)
    return _text(_canonical(obj) if isinstance(obj, HardwareProfile) else obj)


def fingerprint(graph: TaskGraph) -> str:
    """Return the SHA-256 of everything that a plan depends on, as hexadecimal digits.

    That is the taskgraph without its versions and without the measured costs of its tasks, because
    these may differ from run to run.
    """
    _require_graph_positions(graph)
    measured = {"tasks": {"__all__": {"workspace_bytes", "time_ns"}}}
    text = _text(graph, exclude={"versions": True, **measured})
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _text(obj: Encodable, *, exclude: Any = None, **more: Any) -> str:
    form = _FORMS[type(obj)]
    values = {f.name: getattr(obj, f.name) for f in fields(obj)} | more
    document = form.model.model_construct(None, kind=form.kind, format=form.version, **values)
    unset = {name: True for name, default in form.sparse.items() if values[name] == default}
    try:
        return (
            document.model_dump_json(exclude={**(exclude or {}), **unset}, warnings="error") + "\n"
        )
    except PydanticSerializationError as error:
        where = _task_at_fault(obj) if isinstance(obj, TaskGraph) else form.kind
        raise InvalidPlanError(f"{where} cannot be written to a file: {error}") from error


def _task_at_fault(graph: TaskGraph) -> str:
    for task in graph.tasks:
        try:
            _FORMS[TaskGraph].model.model_construct(None, tasks=(task,)).model_dump_json()
        except PydanticSerializationError:
            return task.where
    return f"taskgraph {graph.name!r}"


def _canonical(profile: HardwareProfile) -> HardwareProfile:
    """Return an equal profile whose rates are floats, in a fixed order."""
    names = ("h2d_bytes_per_s", "d2h_bytes_per_s", "memory_bytes_per_s")
    rates: dict[str, Any] = {name: float(getattr(profile, name)) for name in names}
    flops = {name: float(rate) for name, rate in sorted(profile.flops_per_s.items())}
    if not all(map(math.isfinite, [*rates.values(), *flops.values()])):
        raise InvalidPlanError(f"hardware profile {profile.name!r}: a rate is not finite")
    return replace(profile, flops_per_s=flops, **rates)


# --- reading ---------------------------------------------------------------------------------


def loads(text: str, expect: type[_T]) -> _T:
    """Return the object that a JSON text stands for.

    Raises:
        InvalidPlanError: The text is not JSON, or of another kind or format version; or a field is
            missing, unknown, of the wrong type or out of range.
    """
    found = expect(**_values(text, expect))
    if isinstance(found, TaskGraph):
        _require_consistent(found)
    elif isinstance(found, Timeline):
        for i, span in enumerate(found.spans):
            if span.end_ns < span.start_ns:
                ends = f"ends at {span.end_ns} ns, before it starts at {span.start_ns} ns"
                raise InvalidPlanError(f"spans[{i}] {ends}")
    return found


def loads_memgraph(text: str, graph: TaskGraph) -> MemGraph:
    """Return the memgraph that a JSON text stands for, on the taskgraph that it was made for.

    This verifies its form; the checker verifies the plan.

    Raises:
        InvalidPlanError: As for `loads`; or the memgraph was made for another taskgraph, or with
            other versions.
    """
    values = _values(text, MemGraph)
    made_for = (values.pop("taskgraph"), values.pop("fingerprint"), values.pop("versions"))
    at_hand = (graph.name, fingerprint(graph), graph.versions)
    if made_for[1:] != at_hand[1:]:
        raise InvalidPlanError(
            f"a plan file of another model or version: it was made for {_identity(*made_for)}, but "
            f"the model at hand is {_identity(*at_hand)}. Plan again, or load the model and the "
            f"versions that the file was made for"
        )
    found = MemGraph(graph=graph, **values)
    _require_positions("nodes", [n.id for n in found.nodes])
    for table, column, num_ids in (
        ("nodes", "buffer", len(graph.buffers)),
        ("nodes", "task", len(graph.tasks)),
        ("edges", "before", len(found.nodes)),
        ("edges", "after", len(found.nodes)),
        ("entry", "buffer", len(graph.buffers)),
        ("exit", "buffer", len(graph.buffers)),
    ):
        _require_known(table, column, map(attrgetter(column), getattr(found, table)), num_ids)
    _require_known("host_slots", "buffer", (b for b, _ in found.host_slots), len(graph.buffers))
    _require_known("routed", "buffer", found.routed, len(graph.buffers))
    _require_sorted("routed", found.routed)
    return found


def _identity(name: str, digest: str, versions: Versions) -> str:
    made_with = ", ".join(f"{package} {version}" for package, version in versions)
    return f"{name!r} (fingerprint {digest[:12]}, {made_with or 'no versions'})"


def _values(text: str, cls: type[Encodable]) -> dict[str, Any]:
    _require_names_in(text, _FORMS[cls])
    try:
        values = dict(_FORMS[cls].model.model_validate_json(text))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
        text = f"{first['msg'].removeprefix('Value error, ')}; found {first['input']!r:.60}"
        raise InvalidPlanError(f"{where.lstrip('.')}: {text}. {_ADVICE}") from error
    del values["kind"], values["format"]
    return values


def _require_names_in(text: str, form: _Form) -> None:
    """Refuse a text that is not JSON of this form, or in which names are wrong.

    Pydantic does not see a repeated key, and puts defaults where a row lacks a field.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except RecursionError as error:
        raise InvalidPlanError("corrupt JSON: nested too deeply") from error
    except ValueError as error:
        raise InvalidPlanError(f"corrupt JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidPlanError(f"expected a JSON object, found {document!r:.40}")
    for field in ("kind", "format"):
        if field not in document:
            raise InvalidPlanError(f"field {field!r} is missing: not a file of ds_finepage")
    if document["kind"] != form.kind:
        raise InvalidPlanError(f"kind is {document['kind']!r}; expected {form.kind}")
    version = document["format"]
    if type(version) is not int or version != form.version:
        raise InvalidPlanError(
            f"{form.kind} has format version {version!r}; this version of ds_finepage reads "
            f"{form.version}. {_ADVICE}"
        )
    columns = form.model.model_fields.items()
    wanted = [name for name, column in columns if column.is_required() or name in document]
    _require_names("the file", document, wanted)
    for field, names in form.rows.items():
        for position, row in enumerate(document.get(field) or ()):
            if isinstance(row, dict) and row.keys() != names:
                _require_names(f"{field}[{position}]", row, names)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key is repeated in an object with the keys {[k for k, _ in pairs]}")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


# --- checks of fields against each other -----------------------------------------------------


def _require_names(where: str, found: Iterable[str], wanted: Iterable[str]) -> None:
    missing = sorted({*wanted} - {*found})
    unknown = sorted({*found} - {*wanted})
    if missing or unknown:
        parts = [f"missing: {', '.join(missing)}"] if missing else []
        parts += [f"unknown: {', '.join(unknown)}"] if unknown else []
        raise InvalidPlanError(f"{where} has wrong fields ({'; '.join(parts)}). {_ADVICE}")


def _require_positions(table: str, ids: Iterable[int]) -> None:
    for position, found in enumerate(ids):
        if found != position:
            raise InvalidPlanError(f"{table}[{position}] has id {found}; ids must be positions")


def _require_graph_positions(graph: TaskGraph) -> None:
    _require_positions("buffers", (b.id for b in graph.buffers))
    _require_positions("tensors", (t.id for t in graph.tensors))
    _require_positions("tasks", (t.index for t in graph.tasks))


def _require_known(table: str, column: str, ids: Iterable[Any], num_ids: int) -> None:
    """Refuse a table with an id that does not exist; a row has one, several or None."""
    for position, value in enumerate(ids):
        for found in value if isinstance(value, (tuple, list)) else (value,):
            if found is not None and not 0 <= found < num_ids:
                where = f"{table}[{position}].{column}"
                raise InvalidPlanError(f"{where} is {found}, which is no id out of {num_ids}")


def _require_sorted(where: str, ids: Sequence[int]) -> None:
    if len(ids) > 1 and any(map(ge, ids, ids[1:])):
        raise InvalidPlanError(f"{where} must be sorted and free of repeats: {list(ids)}")


def _require_consistent(graph: TaskGraph) -> None:
    num_buffers, num_tensors, num_tasks = map(len, (graph.buffers, graph.tensors, graph.tasks))
    _require_graph_positions(graph)
    for table, column, num_ids in (
        ("buffers", "gather", num_tensors),
        ("tensors", "buffer", num_buffers),
        ("tasks", "results", num_tensors),
        ("tasks", "reads", num_buffers),
        ("tasks", "writes", num_buffers),
        ("tasks", "touches", num_buffers),
        ("inputs", "tensor", num_tensors),
        ("outputs", "tensor", num_tensors),
    ):
        _require_known(table, column, map(attrgetter(column), getattr(graph, table)), num_ids)
    for field in ("args", "kwargs"):
        named = ([ref.tensor for ref in refs(getattr(t, field))] for t in graph.tasks)
        _require_known("tasks", field, named, num_tensors)
    for task in graph.tasks:
        for field in ("reads", "writes", "touches"):
            _require_sorted(f"tasks[{task.index}].{field}", getattr(task, field))
    for i, view in enumerate(graph.tensors):
        if len(view.shape) != len(view.stride):
            sizes = f"{len(view.shape)} sizes but {len(view.stride)} strides"
            raise InvalidPlanError(f"tensors[{i}] has {sizes}")
    for i, output in enumerate(graph.outputs):
        if sum(part is not None for part in (output.tensor, output.position, output.host)) > 1:
            raise InvalidPlanError(f"outputs[{i}] is more than one of tensor, position, host")
    for i, call in enumerate(graph.calls):
        if not call.begin <= call.end <= num_tasks:
            ran = f"tasks [{call.begin}, {call.end}), not inside 0..{num_tasks}"
            raise InvalidPlanError(f"calls[{i}] runs {ran}")


# --- files -----------------------------------------------------------------------------------


def save(obj: Encodable, path: str | os.PathLike[str]) -> None:
    """Write an object to a file, all of it or nothing.

    Raises:
        ConfigError: The file cannot be written.
        InvalidPlanError: As for `dumps`.
    """
    write_file(path, dumps(obj))


def save_plan(memgraph: MemGraph, path: str | os.PathLike[str]) -> None:
    """Write a memgraph and its taskgraph to one file, one line each.

    Raises:
        ConfigError: The file cannot be written.
        InvalidPlanError: As for `dumps`.
    """
    write_file(path, dumps(memgraph.graph) + dumps(memgraph))


def load_plan(path: str | os.PathLike[str]) -> MemGraph:
    """Read a file of `save_plan`.

    Raises:
        ConfigError: The file cannot be read.
        InvalidPlanError: As for `loads` and `loads_memgraph`; the message begins with the path.
    """
    with _text_of(path) as text:
        graph, _, memgraph = text.partition("\n")
        if '"kind"' not in graph:
            raise InvalidPlanError("no plan: 'ds-finepage plan --out' writes plans")
        return loads_memgraph(memgraph, loads(graph, TaskGraph))


def load(path: str | os.PathLike[str], expect: type[_T]) -> _T:
    """Read an object from a file.

    Raises:
        ConfigError: The file cannot be read.
        InvalidPlanError: As for `loads`; the message begins with the path.
    """
    with _text_of(path) as text:
        return loads(text, expect)


@contextlib.contextmanager
def _text_of(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield the text of a file; errors inside the block name the file."""
    try:
        yield read_file(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPlanError(f"{os.fspath(path)}: not UTF-8 text: {error}") from error
    except InvalidPlanError as error:
        raise InvalidPlanError(f"{os.fspath(path)}: {error}") from error
