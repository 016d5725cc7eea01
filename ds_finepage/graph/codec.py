"""Plain data as versioned JSON, and back without loss.

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

import contextlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, overload

from ds_finepage.errors import ConfigError, InvalidPlanError
from ds_finepage.graph.codec_form import KINDS, Encodable, Standalone
from ds_finepage.graph.codec_read import (
    kind_of,
    parse_document,
    read_memgraph,
    read_profile,
    read_taskgraph,
    read_timeline,
)
from ds_finepage.graph.codec_write import (
    document_text,
    fingerprint,
    memgraph_fields,
    profile_fields,
    taskgraph_fields,
    timeline_fields,
)
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.graph.timeline import Timeline

_T = TypeVar("_T", bound=Standalone)

__all__ = [
    "dumps",
    "fingerprint",
    "load",
    "load_memgraph",
    "loads",
    "loads_memgraph",
    "save",
    "write_text",
]


# --- text ------------------------------------------------------------------------------------


def dumps(obj: Encodable) -> str:
    """Return the one JSON text of an object.

    Raises:
        InvalidPlanError: Something in the object has no place in the form: an id that is not the
            position, or a task's argument of another type than `Task` names.
    """
    if isinstance(obj, TaskGraph):
        fields = taskgraph_fields(obj)
    elif isinstance(obj, MemGraph):
        fields = memgraph_fields(obj)
    elif isinstance(obj, Timeline):
        fields = timeline_fields(obj)
    else:
        fields = profile_fields(obj)
    return document_text(KINDS[type(obj)], fields)


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
    document = parse_document(text)
    readers: dict[str, Callable[[dict[str, Any]], Standalone]] = {
        "taskgraph": read_taskgraph,
        "timeline": read_timeline,
        "hardware_profile": read_profile,
    }
    kind = kind_of(document, tuple(readers) if expect is None else (KINDS[expect],))
    return readers[kind](document)


def loads_memgraph(text: str, graph: TaskGraph) -> MemGraph:
    """Return the memgraph that a JSON text stands for, on the taskgraph that it was made for.

    Its form is verified here; whether it is a right plan is for the checker to say.

    Raises:
        InvalidPlanError: As for `loads`; or the memgraph was made for another taskgraph, or with
            other versions.
    """
    document = parse_document(text)
    kind_of(document, (KINDS[MemGraph],))
    return read_memgraph(document, graph)


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
