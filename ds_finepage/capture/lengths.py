"""Sizes that differ from call to call: captured as symbols, evaluated where they are needed.

A cache that grows by a row a step would otherwise need a capture a step. Dynamo passes each size
that has changed before as an integer of its own; here those integers become symbols of a shape
environment of ours, the pass is recorded once, and every size in the recording is an expression
in them. The guards of the recording (its assumptions about the sizes) are kept, and checked before
it is used for other sizes.
"""

# Floor 2.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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

MIN_BUCKET = 16
"""Calls with fewer rows are planned for this many."""

NEAR = 2
SMALL = 8

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


def upper_end(values: Mapping[str, int]) -> dict[str, int]:
    """Return the sizes to plan for, at least as large as those of a call.

    The largest is rounded up to a power of two, so that a growing cache needs one plan for each
    doubling. Sizes next to it (a cache's length, and that of a mask one longer) move by the same
    amount, so that the guards of the recording hold. The others are rounded by themselves, except
    small ones (a batch).
    """
    largest = max(values.values(), default=0)
    if largest <= 1:
        return dict(values)
    bucket = max(MIN_BUCKET, _power_above(largest))
    return {
        name: value + bucket - largest
        if largest - value <= NEAR
        else (_power_above(value) if value > SMALL else value)
        for name, value in values.items()
    }


def _power_above(value: int) -> int:
    return 1 << (value - 1).bit_length()


class Evaluator:
    """Turns the sizes of a recording into integers, those that vary into :class:`Length`."""

    def __init__(self, values: Mapping[str, int]) -> None:
        """Evaluate at these values of the symbols."""
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

    def all(self, sizes: Sequence[Size]) -> tuple[int, ...]:
        """Return the values of several sizes."""
        return tuple(self(s) for s in sizes)


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
        self._guards: tuple[sympy.Expr, ...] | None = None  # once the recording is done
        self._asked: dict[tuple[int, ...], bool] = {}
        for position, node in enumerate(placeholders):
            example = node.meta.get("example_value")
            if not isinstance(example, torch.SymInt) or type(args[position]) is not int:
                continue
            symbol = example.node.expr
            if isinstance(symbol, sympy.Symbol) and symbol not in self._nodes:
                self._nodes[symbol] = self._make(example, args[position], position)

    def _make(self, example: torch.SymInt, value: int, position: int) -> torch.SymInt:
        source = ConstantSource(f"call_{position}")
        theirs = example.node.shape_env.var_to_range.get(
            example.node.expr, ValueRanges.unknown_int()
        )
        symbol = self.env.create_symbol(
            value,
            source,
            dynamic_dim=DimDynamic.DYNAMIC,
            constraint_dim=None,
            positive=None,
            do_not_specialize_zero_one=True,
        )
        self.env.var_to_range[symbol] = theirs
        self.positions[str(symbol)] = position
        self.values[str(symbol)] = value
        found = self.env.create_symintnode(symbol, hint=value, source=source)
        assert isinstance(found, torch.SymInt)
        return found

    def __bool__(self) -> bool:
        """True where any size varies."""
        return bool(self._nodes)

    def of(self, value: Any) -> Any:
        """Return an integer of Dynamo's graph in terms of our symbols."""
        if not isinstance(value, torch.SymInt):
            return value
        expression = value.node.expr
        if expression.is_number:
            return int(expression)
        return sympy_interp(PythonReferenceAnalysis, self._nodes, expression)

    def all(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return several of them."""
        return tuple(self.of(v) for v in values)

    def admits(self, values: Mapping[str, int]) -> bool:
        """Tell whether what the recording took for granted holds for other sizes too."""
        if self._guards is None:
            self._guards = tuple(g.expr for g in self.env.guards)
        if not self._guards:
            return True
        asked = tuple(values.values())
        if asked not in self._asked:
            if len(self._asked) >= MAX_ANSWERS:
                self._asked.clear()
            symbols = {s for guard in self._guards for s in guard.free_symbols}
            at = {s: sympy.Integer(values[str(s)]) for s in symbols}
            holds = all(guard.xreplace(at) == sympy.true for guard in self._guards)
            self._asked[asked] = holds
        return self._asked[asked]
