"""Sizes that differ from call to call: symbols, expressions in them, and their values.

The symbols are those of a shape environment of ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import sympy
import torch
from torch.fx import Node

from ds_finepage._compat.torch import (
    ConstantSource,
    DimDynamic,
    PythonPrinter,
    PythonReferenceAnalysis,
    ShapeEnv,
    ValueRanges,
    sympy_interp,
)
from ds_finepage.graph.taskgraph import Length

FORMULA_NAMES: dict[str, Any] = {"__builtins__": {"min": min, "max": max}, "math": math}
"""What a formula may name beside symbols. Formulas are written here and never read from files."""

MAX_ANSWERS = 4096
"""Sizes for which it is remembered whether a recording holds."""

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


class SymbolicSizes:
    """The symbols of one call of a Dynamo graph.

    Attributes:
        env: The shape environment that fake tensors and guards belong to.
        positions: Symbol -> call position of the integer that carries it.
        values: Symbol -> what this call passes.
    """

    def __init__(self, placeholders: Sequence[Node], args: Sequence[Any]) -> None:
        """Make a symbol for each integer argument that Dynamo calls by a symbol of its own."""
        self.env = ShapeEnv(duck_shape=False, specialize_zero_one=False)
        self.positions: dict[str, int] = {}
        self.values: dict[str, int] = {}
        self._nodes: dict[sympy.Symbol, torch.SymInt] = {}
        self._holds = lru_cache(MAX_ANSWERS)(self._guards_hold)
        for position, node in enumerate(placeholders):
            example = node.meta.get("example_value")
            if not isinstance(example, torch.SymInt) or type(args[position]) is not int:
                continue
            symbol = example.node.expr
            if isinstance(symbol, sympy.Symbol) and symbol not in self._nodes:
                self._nodes[symbol] = self._make(example, args[position], position)

    def _make(self, example: torch.SymInt, value: int, position: int) -> torch.SymInt:
        env: Any = example.node.shape_env
        theirs = env.var_to_range.get(example.node.expr, ValueRanges.unknown_int())
        source = ConstantSource(f"call_{position}")
        found = self.env.create_unspecified_symint_and_symbol(value, source, DimDynamic.DYNAMIC)
        assert isinstance(found, torch.SymInt)
        self.env.var_to_range[found.node.expr] = theirs
        self.positions[str(found.node.expr)] = position
        self.values[str(found.node.expr)] = value
        return found

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def of(self, value: Any) -> Any:
        """Return an integer of Dynamo's graph in terms of our symbols."""
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr
        if expression.is_number:
            return int(expression)
        return sympy_interp(PythonReferenceAnalysis, self._nodes, expression)

    def admits(self, values: Mapping[str, int]) -> bool:
        """Tell whether what the recording took for granted holds for other sizes too."""
        return not self.env.guards or self._holds(tuple(values.items()))

    def _guards_hold(self, values: tuple[tuple[str, int], ...]) -> bool:
        sizes = dict(values)
        guards = [guard.expr for guard in self.env.guards]
        at = {s: sympy.Integer(sizes[str(s)]) for guard in guards for s in guard.free_symbols}
        return all(guard.xreplace(at) == sympy.true for guard in guards)
