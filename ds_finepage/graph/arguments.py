"""The values that a task passes to its op, and their form in a file.

JSON's null, booleans, numbers and strings stand for themselves, and an array is a tuple. An object
with one key is a value that JSON has no word for: ``{"ref": 3}``, ``{"symbol": ["dtype",
"float32"]}``, ``{"float": "nan"}``, ``{"bytes": "AAE="}``. Python calls 1, 1.0 and True equal; a
file keeps them apart.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from pydantic import PlainSerializer, PlainValidator


@dataclass(frozen=True, slots=True)
class Ref:
    """Stands for a tensor inside a task's arguments."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """Stands for a torch enumeration inside a task's arguments: dtype, layout, device, ..."""

    kind: str  # "dtype" | "layout" | "memory_format" | "device"
    name: str


class Length(int):
    """A size that depends on the sizes of a call; as an integer, the planned size.

    Attributes:
        formula: Python arithmetic over ``TaskGraph.symbols``. The results of integer arithmetic
            have none. Files have none either: a taskgraph in a file has one size.
    """

    formula: str

    def __new__(cls, value: int, formula: str) -> Length:
        """Make the integer ``value`` that ``formula`` gives for the planned sizes."""
        found = super().__new__(cls, value)
        found.formula = formula
        return found

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]
        return int(self), self.formula


_NON_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def refs(value: Any) -> Iterator[Ref]:
    """Yield every tensor reference in an argument, inside nested tuples too."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from refs(part)


def _to_json(value: Any) -> Any:
    kind = type(value)  # not isinstance: a subclass would come back as another type
    if value is None or kind in (bool, int, str):
        return value
    if kind is Ref:
        return {"ref": value.tensor}
    if kind is tuple:
        return [_to_json(part) for part in value]
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is Symbol:
        return {"symbol": [value.kind, value.name]}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if kind is Length:
        return int(value)  # a file is of one size
    raise ValueError(
        f"an argument of type {kind.__name__} cannot be written to a file; arguments are nested "
        f"tuples of Ref, Symbol, None, bool, int, float, str and bytes"
    )


def _from_json(plain: Any) -> Any:
    if plain is None or isinstance(plain, (bool, int, str)):
        return plain
    if isinstance(plain, list):
        return tuple(_from_json(part) for part in plain)
    if isinstance(plain, float):
        if not math.isfinite(plain):  # such as 1e999
            raise ValueError("a number is too large for a float")
        return plain
    match plain:
        case {"ref": int(tensor)} if len(plain) == 1 and type(tensor) is int and tensor >= 0:
            return Ref(tensor)
        case {"symbol": [str(kind), str(name)]} if len(plain) == 1:
            return Symbol(kind, name)
        case {"float": str(name)} if len(plain) == 1 and name in _NON_FINITE:
            return _NON_FINITE[name]
        case {"bytes": str(text)} if len(plain) == 1:
            try:
                return base64.b64decode(text, validate=True)
            except ValueError as error:
                raise ValueError(f"{text!r} is not base64: {error}") from error
    raise ValueError(f"{plain!r} stands for no argument")


Argument: TypeAlias = Annotated[Any, PlainValidator(_from_json), PlainSerializer(_to_json)]
"""Nested tuples of Ref, Symbol, None, bool, int, float, str and bytes."""
