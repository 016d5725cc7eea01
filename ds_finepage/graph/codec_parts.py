"""The smallest parts of reading: each raises where a value is not what its place calls for."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from ds_finepage.errors import InvalidPlanError

# --- the smallest parts: each raises where a value is not what its place calls for -------------


def refuse(where: str, message: str) -> NoReturn:
    """Raise with where and why."""
    raise InvalidPlanError(f"{where} {message}")


def type_name(value: Any) -> str:
    """Name the JSON type of a value."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else f"the number {value!r}")


def require_keys(found: dict[str, Any], wanted: Sequence[str], where: str) -> None:
    """Refuse an object with fields missing or too many."""
    missing = [name for name in wanted if name not in found]
    unknown = [name for name in found if name not in wanted]
    if missing or unknown:
        parts = [f"missing: {', '.join(missing)}"] if missing else []
        parts += [f"unknown: {', '.join(unknown)}"] if unknown else []
        raise InvalidPlanError(f"{where or 'the file'} has wrong fields ({'; '.join(parts)})")


def rows_of(document: dict[str, Any], field: str, columns: tuple[str, ...]) -> list[list[Any]]:
    """Return the rows of a table whose columns are as expected."""
    table = document[field]
    if not isinstance(table, dict):
        refuse(field, f"must be an object, not {type_name(table)}")
    require_keys(table, ("columns", "rows"), field)
    if table["columns"] != list(columns):
        refuse(field, f"has the columns {table['columns']!r}; expected {list(columns)!r}")
    rows = as_list(table["rows"], f"{field}.rows")
    for position, row in enumerate(rows):
        if not isinstance(row, list):
            refuse(f"{field}[{position}]", f"must be an array, not {type_name(row)}")
        if len(row) != len(columns):
            refuse(f"{field}[{position}]", f"has {len(row)} values; expected {len(columns)}")
    return rows


def as_list(value: Any, where: str) -> list[Any]:
    """Return an array."""
    if not isinstance(value, list):
        refuse(where, f"must be an array, not {type_name(value)}")
    return value


def as_text(value: Any, where: str) -> str:
    """Return a string."""
    if not isinstance(value, str):
        refuse(where, f"must be a string, not {type_name(value)}")
    return value


def as_integer(value: Any, where: str) -> int:
    """Return an integer."""
    if type(value) is not int:
        refuse(where, f"must be an integer, not {type_name(value)}")
    return value


def as_count(value: Any, where: str) -> int:
    """Return an integer that is not negative."""
    if type(value) is not int:
        refuse(where, f"must be an integer, not {type_name(value)}")
    if value < 0:
        refuse(where, f"is {value}; it must not be negative")
    return value


def as_counts(value: Any, where: str) -> tuple[int, ...]:
    """Return integers that are not negative."""
    return tuple(as_count(v, where) for v in as_list(value, where))


def as_id(value: Any, where: str, num_ids: int) -> int:
    """Return an id that exists."""
    if type(value) is not int or not 0 <= value < num_ids:
        refuse(where, f"is {value!r}, which is no id out of {num_ids}")
    return value


def as_buffer_ids(value: Any, where: str, num_buffers: int) -> tuple[int, ...]:
    """Return ids of buffers, ascending."""
    ids = tuple(as_id(v, where, num_buffers) for v in as_list(value, where))
    if any(after <= before for before, after in zip(ids, ids[1:], strict=False)):
        refuse(where, f"must be sorted and free of repeats: {ids}")
    return ids


def require_position(value: Any, where: str, position: int) -> int:
    """Return an id that is the position of its row."""
    if type(value) is not int or value != position:
        refuse(where, f"has id {value!r}; ids must be positions")
    return position


def as_finite(value: float, where: str) -> float:
    """Return a float that is a number."""
    if not math.isfinite(value):  # such as 1e999
        refuse(where, "is too large for a float")
    return value


def as_rate(value: Any, where: str) -> float:
    """Return a positive float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(where, f"must be a number, not {type_name(value)}")
    try:
        return as_finite(float(value), where)
    except OverflowError:
        refuse(where, "is too large for a float")


_M = TypeVar("_M")


def as_member(value: Any, where: str, members: dict[str, _M]) -> _M:
    """Return the member of an enumeration."""
    if not isinstance(value, str) or value not in members:
        refuse(where, f"is {value!r}; expected one of {', '.join(members)}")
    return members[value]


def as_bytes(value: Any, where: str) -> bytes:
    """Return the bytes of a base64 string."""
    try:
        return base64.b64decode(as_text(value, where), validate=True)
    except ValueError as error:
        raise InvalidPlanError(f"{where} is not base64: {error}") from error


def as_versions(value: Any) -> tuple[tuple[str, str], ...]:
    """Return pairs of package and version."""
    found = []
    for pair in as_list(value, "versions"):
        if not isinstance(pair, list) or len(pair) != 2:
            refuse("versions", f"holds {pair!r}, which is not a name and a version")
        found.append((as_text(pair[0], "versions"), as_text(pair[1], "versions")))
    return tuple(found)
