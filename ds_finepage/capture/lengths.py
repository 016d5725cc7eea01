"""Sizes that differ from call to call, as expressions in symbols, and their values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import sympy
import torch

from ds_finepage._compat.torch import PythonPrinter
from ds_finepage.graph.taskgraph import Length

FORMULA_NAMES: dict[str, Any] = {"__builtins__": {"min": min, "max": max}, "math": math}
"""What a formula may name beside symbols. Formulas are written here and never read from files."""

Size: TypeAlias = "int | sympy.Expr"


def size_of(value: int | torch.SymInt) -> Size:
    """Return a size as a number, or as an expression in the symbols that it depends on."""
    if not isinstance(value, torch.SymInt):
        return int(value)
    expression = value.node.expr
    return int(expression) if expression.is_number else expression


def sizes_of(values: Sequence[int | torch.SymInt]) -> tuple[Any, ...]:
    """Return several sizes; see :func:`size_of`."""
    return tuple(map(size_of, values))


def symbols_of(sizes: Iterable[Size]) -> frozenset[str]:
    """Return the names of the symbols that any of some sizes depends on."""
    return frozenset(str(s) for e in set(sizes) if not isinstance(e, int) for s in e.free_symbols)


def with_known_shapes(op: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return an op's arguments in a form from which torch can work out shapes with symbols.

    torch expands what ``baddbmm`` adds on its own, but not to sizes that are symbols.
    """
    if op is torch.ops.aten.baddbmm.default:
        added, left, right = args
        shape = (left.shape[0], left.shape[1], right.shape[2])
        if any(isinstance(size, torch.SymInt) for size in (*added.shape, *shape)):
            return (added.expand(shape), left, right)
    return args


class Evaluator:
    """Turns the sizes of a recording into integers, those that vary into :class:`Length`."""

    def __init__(self, values: Mapping[str, int]) -> None:
        self._values = dict(values)
        self._printer = PythonPrinter()
        self._known: dict[sympy.Expr, Length] = {}

    def __call__(self, size: Size) -> int:
        """Return the value of a size."""
        if isinstance(size, int):
            return size
        if size not in self._known:
            text = self._printer.doprint(size)
            self._known[size] = Length(evaluate(text, self._values), text)
        return self._known[size]


def evaluate(text: str, values: Mapping[str, int]) -> int:
    """Return the value of a formula that :class:`Evaluator` wrote."""
    return int(eval(text, FORMULA_NAMES, dict(values)))
