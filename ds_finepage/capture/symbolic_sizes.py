"""The sizes of a call that differ from call to call, as symbols of a shape environment of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx import Node

from ds_finepage._compat.torch import (
    ConstantSource,
    DimDynamic,
    PythonReferenceAnalysis,
    ShapeEnv,
    ValueRanges,
    sympy_interp,
)

MAX_ANSWERS = 4096
"""Sizes for which it is remembered whether a recording holds."""


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

    def all(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Return several of them."""
        return tuple(self.of(v) for v in values)

    def admits(self, values: Mapping[str, int]) -> bool:
        """Tell whether what the recording took for granted holds for other sizes too."""
        return not self.env.guards or self._holds(tuple(values.items()))

    def _guards_hold(self, values: tuple[tuple[str, int], ...]) -> bool:
        sizes = dict(values)
        guards = [guard.expr for guard in self.env.guards]
        at = {s: sympy.Integer(sizes[str(s)]) for guard in guards for s in guard.free_symbols}
        return all(guard.xreplace(at) == sympy.true for guard in guards)
