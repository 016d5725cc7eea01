"""Writes a graph of Dynamo as bytes, and reads it in another process.

torch's own pickler takes the nodes. Beside them are kept the sizes of the arguments, in terms of
Dynamo's symbols, and the module that each op comes from. No tensor is kept.
"""

from __future__ import annotations

import hashlib
from typing import Any

import sympy
import torch
from torch.fx import GraphModule

from ds_finepage._compat.torch import (
    FakeTensorMode,
    PythonReferenceAnalysis,
    ShapeEnv,
    ValueRanges,
    sympy_interp,
)
from ds_finepage._compat.traces import GraphPickler, Options
from ds_finepage.capture.identities import NotKeptError
from ds_finepage.capture.symbolic_sizes import new_size

ARGUMENT, MODULE, NUMBER = "argument", "module", "number"
"""The metadata of nodes that are kept."""

NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)

DIGEST = "ds_finepage_digest"
"""The metadata of a graph that was written or read: the hash of its bytes."""

HINT = 4
"""The size that a symbol of a kept graph stands for, where torch wants one."""


def dump_graph(module: GraphModule) -> bytes:
    """Write a graph.

    Args:
        module: What Dynamo hands to its backend. It gets metadata, and so do its nodes.

    Raises:
        NotKeptError: The graph holds tensors or graphs.
    """
    for node in module.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            raise NotKeptError(f"a graph that holds {node.target} is not kept")
        value = node.meta.get("example_value")
        if node.op == "placeholder":
            node.meta[ARGUMENT] = _describe(value)
        elif isinstance(value, NUMBERS):
            node.meta[NUMBER] = True
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta[MODULE] = next(reversed(stack.values()))[0]
    options = Options(
        ops_filter=None, node_metadata_key_filter=lambda key: key in (ARGUMENT, MODULE, NUMBER)
    )
    found: bytes = GraphPickler.dumps(module, options)
    module.meta[DIGEST] = _digest_of(found)
    return found


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _describe(value: Any) -> tuple[Any, ...]:
    if isinstance(value, torch.Tensor):
        if type(value).__name__ != "FakeTensor" or value.layout is not torch.strided:
            raise NotKeptError(f"a graph with an argument of type {type(value).__name__}")
        shape, stride = map(_text, value.shape), map(_text, value.stride())
        return "tensor", tuple(shape), tuple(stride), value.dtype, value.device
    if isinstance(value, torch.SymInt):
        env: Any = value.node.shape_env
        return "size", _text(value), env.var_to_range.get(value.node.expr)
    return "value", value


def _text(size: int | torch.SymInt) -> int | str:
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else str(expression)


class _Sizes:
    """Makes the sizes of a kept graph from their text."""

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self._known: dict[sympy.Symbol, torch.SymInt] = {}

    def add(self, name: str, ranges: Any) -> None:
        """Make a symbol; ``ranges`` are the values that it can have."""
        made = new_size(self.env, f"kept_{name}", HINT, ranges or ValueRanges.unknown_int())
        self._known[sympy.Symbol(name, integer=True)] = made

    def of(self, text: int | str) -> Any:
        """Return the size that a text says."""
        if isinstance(text, int):
            return text
        names = {str(s): s for s in self._known}
        expression = sympy.sympify(text, locals=names)
        return sympy_interp(PythonReferenceAnalysis, self._known, expression)


def load_graph(content: bytes) -> GraphModule:
    """Read a graph that :func:`dump_graph` wrote, with the metadata that a recording needs."""
    sizes = _Sizes()
    mode = FakeTensorMode(shape_env=sizes.env)
    module = GraphPickler.loads(content, mode)
    assert isinstance(module, GraphModule)
    arguments = [n for n in module.graph.nodes if ARGUMENT in n.meta]
    for node in arguments:
        kind, *facts = node.meta[ARGUMENT]
        if kind == "size" and str(facts[0]).isidentifier():
            sizes.add(*facts)
    with mode, torch.no_grad():
        for node in arguments:
            node.meta["example_value"] = _made(sizes, *node.meta[ARGUMENT])
    for node in module.graph.nodes:
        if NUMBER in node.meta:
            node.meta["example_value"] = 0
        if MODULE in node.meta:
            node.meta["nn_module_stack"] = {"": (node.meta[MODULE], None)}
    module.meta[DIGEST] = _digest_of(content)
    module.recompile()
    return module


def _made(sizes: _Sizes, kind: str, *facts: Any) -> Any:
    if kind == "tensor":
        shape, stride, dtype, device = facts
        return torch.empty_strided(
            tuple(map(sizes.of, shape)), tuple(map(sizes.of, stride)), dtype=dtype, device=device
        )
    return sizes.of(facts[0]) if kind == "size" else facts[0]
