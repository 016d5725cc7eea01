"""Plain data as JSON files, and back without loss.

Writes and reads `MemGraph` with its taskgraph, `TaskGraph`, `Timeline` and `HardwareProfile`. A
file names its ``kind`` and the version of its ``format``; the other fields are those of the class.
Equal objects give equal bytes. Pydantic refuses fields that are missing, unknown or of another
type. A plan that is read is of the right form; the checker then finds out whether it is right.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import fields, replace
from operator import attrgetter
from typing import Any, Literal, TypeAlias, TypeVar, get_type_hints

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
_T = TypeVar("_T", TaskGraph, MemGraph, Timeline, HardwareProfile)

_STRICT = ConfigDict(
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    ser_json_bytes="base64",
    val_json_bytes="base64",
)
_ADVICE = (
    "Write the file again with this version of ds_finepage: 'ds-finepage plan --out' for a plan, "
    "'ds-finepage probe --out' for a hardware profile"
)


def _form(cls: type[Encodable], kind: str, version: int) -> type[BaseModel]:
    """Return the fields of a file: those of a dataclass; only ``DETAILS`` may be left out.

    The version is raised with every change. There is no reader for older versions.
    """
    hints = get_type_hints(cls, include_extras=True)
    columns: dict[str, Any] = {"kind": (Literal[kind], kind), "format": (Literal[version], version)}
    for field in fields(cls):
        columns[field.name] = hints[field.name], field.default if field.name in DETAILS else ...
    return create_model(cls.__name__, __config__=_STRICT, **columns)


_FORMS: dict[type[Encodable], type[BaseModel]] = {
    TaskGraph: _form(TaskGraph, "taskgraph", 5),
    MemGraph: _form(MemGraph, "memgraph", 5),
    Timeline: _form(Timeline, "timeline", 3),
    HardwareProfile: _form(HardwareProfile, "hardware_profile", 1),
}


def dumps(obj: Encodable) -> str:
    """Return the one JSON text of an object. A file is of one size, so it has no ``symbols``.

    Raises:
        InvalidPlanError: A file cannot hold the object: a task's argument has another type than
            `Argument` names.
    """
    if isinstance(obj, MemGraph):
        return _text(replace(obj, graph=replace(obj.graph, symbols=())))
    text = _text(replace(obj, symbols=()) if isinstance(obj, TaskGraph) else obj)
    if isinstance(obj, HardwareProfile):
        loads(text, HardwareProfile)  # a rate may not be finite
    return text


def fingerprint(graph: TaskGraph) -> str:
    """Return the SHA-256 of everything that a plan depends on, as hexadecimal digits.

    That is the taskgraph without its versions and without the measured costs of its tasks, because
    these may differ from run to run.
    """
    measured = {"tasks": {"__all__": {"workspace_bytes", "time_ns"}}}
    text = _text(graph, exclude={"symbols": True, "versions": True, **measured})
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _text(obj: Encodable, exclude: Any = None) -> str:
    document = _FORMS[type(obj)].model_construct(
        **{f.name: getattr(obj, f.name) for f in fields(obj)}
    )
    try:
        return document.model_dump_json(exclude=exclude, warnings="error") + "\n"
    except PydanticSerializationError as error:
        where = _at_fault(obj.graph if isinstance(obj, MemGraph) else obj)
        raise InvalidPlanError(f"{where} cannot be written to a file: {error}") from error


def _at_fault(obj: Encodable) -> str:
    """Name what cannot be written: a task, if it is one."""
    for task in obj.tasks if isinstance(obj, TaskGraph) else ():
        try:
            _FORMS[TaskGraph].model_construct(tasks=(task,)).model_dump_json()
        except PydanticSerializationError:
            return task.where
    return type(obj).__name__


def loads(text: str | bytes, expect: type[_T]) -> _T:
    """Return the object that a JSON text stands for.

    Raises:
        InvalidPlanError: The text is not JSON, or of another kind or format version; or a field is
            missing, unknown, of the wrong type or out of range.
    """
    try:
        document = json.loads(text, object_pairs_hook=_unique)  # pydantic takes the last of two
    except (RecursionError, ValueError) as error:
        raise InvalidPlanError(f"Invalid JSON: {error}. {_ADVICE}") from error
    try:
        values = dict(_FORMS[expect].model_validate_json(text))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
        where = f"{where.lstrip('.')}: " if where else ""
        cause = f"{first['msg'].removeprefix('Value error, ')}; found {first['input']!r:.60}"
        raise InvalidPlanError(f"{where}{cause}. {_ADVICE}") from error
    del values["kind"], values["format"]
    found = expect(**values)
    if isinstance(found, HardwareProfile):
        return found
    if json.loads(dumps(found)) != document:  # pydantic puts defaults where a row lacks a field
        raise InvalidPlanError(f"a row lacks a field. {_ADVICE}")
    if isinstance(found, Timeline):
        for i, span in enumerate(found.spans):
            if span.end_ns < span.start_ns:
                raise InvalidPlanError(
                    f"spans[{i}] ends at {span.end_ns} ns, before it starts at {span.start_ns} ns"
                )
    else:
        _require_consistent(found.graph if isinstance(found, MemGraph) else found)
    if isinstance(found, MemGraph):
        _require_known("routed", "buffer", found.routed, len(found.graph.buffers))
        if list(found.routed) != sorted(set(found.routed)):
            raise InvalidPlanError(f"routed must be sorted and free of repeats: {found.routed}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"a key is repeated in an object with the keys {[k for k, _ in pairs]}")
    return found


def _require_consistent(graph: TaskGraph) -> None:
    """Refuse what the checker takes for granted; it sees the other faults of a plan."""
    for i, view in enumerate(graph.tensors):
        if view.id != i:
            raise InvalidPlanError(f"tensors[{i}] has id {view.id}; ids must be positions")
        if len(view.shape) != len(view.stride):
            sizes = f"{len(view.shape)} sizes but {len(view.stride)} strides"
            raise InvalidPlanError(f"tensors[{i}] has {sizes}")
    for i, output in enumerate(graph.outputs):
        if sum(part is not None for part in (output.tensor, output.position, output.host)) > 1:
            raise InvalidPlanError(f"outputs[{i}] is more than one of tensor, position, host")
    for i, call in enumerate(graph.calls):
        if not call.begin <= call.end <= len(graph.tasks):
            ran = f"tasks [{call.begin}, {call.end}), not inside 0..{len(graph.tasks)}"
            raise InvalidPlanError(f"calls[{i}] runs {ran}")
    num_buffers, num_tensors = len(graph.buffers), len(graph.tensors)
    for table, column, num_ids in (
        ("buffers", "gather", num_tensors),
        ("tensors", "buffer", num_buffers),
        ("tasks", "results", num_tensors),
        ("inputs", "tensor", num_tensors),
        ("outputs", "tensor", num_tensors),
    ):
        _require_known(table, column, map(attrgetter(column), getattr(graph, table)), num_ids)
    for field in ("args", "kwargs"):
        named = ([ref.tensor for ref in refs(getattr(t, field))] for t in graph.tasks)
        _require_known("tasks", field, named, num_tensors)


def _require_known(table: str, column: str, ids: Iterable[Any], num_ids: int) -> None:
    """Refuse a table with an id that does not exist; a row has one, several or None."""
    for position, value in enumerate(ids):
        for found in value if isinstance(value, (tuple, list)) else (value,):
            if found is not None and not 0 <= found < num_ids:
                where = f"{table}[{position}].{column}"
                raise InvalidPlanError(f"{where} is {found}, which is no id out of {num_ids}")


def save(obj: Encodable, path: str | os.PathLike[str]) -> None:
    """Write an object to a file, all of it or nothing.

    Raises:
        ConfigError: The file cannot be written.
        InvalidPlanError: As for `dumps`.
    """
    write_file(path, dumps(obj))


def load(path: str | os.PathLike[str], expect: type[_T]) -> _T:
    """Read an object from a file.

    Raises:
        ConfigError: The file cannot be read.
        InvalidPlanError: As for `loads`; the message begins with the path.
    """
    try:
        return loads(read_file(path), expect)
    except InvalidPlanError as error:
        raise InvalidPlanError(f"{os.fspath(path)}: {error}") from error
