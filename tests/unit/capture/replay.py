"""Captures small functions and runs what was captured, as plainly as can be.

Every buffer gets memory of its own, full of NaN, and the tasks run in program order. Whatever the
taskgraph says is all that there is to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import symbolic_trace

from ds_finepage.capture.dynamo_graph import DynamoGraph
from ds_finepage.capture.recording import record
from ds_finepage.execution.arena import view_of
from ds_finepage.execution.ops import bind
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph


def traced(
    function: Callable[..., Any], *args: Any, weights: dict[int, str] | None = None
) -> DynamoGraph:
    """Trace a function by symbols, without Dynamo; ``weights`` names arguments by position."""
    names = {id(args[i]): name for i, name in (weights or {}).items()}
    module = symbolic_trace(function)
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    if not isinstance(output.args[0], tuple):  # Dynamo's graphs always return a tuple
        output.args = ((output.args[0],),)
        module.recompile()
    return DynamoGraph(module, args, names, "sketch")


def captured(
    function: Callable[..., Any], *args: Any, weights: dict[int, str] | None = None
) -> TaskGraph:
    """Capture a function for the shapes of these arguments; weights become parameters."""
    args = tuple(
        torch.nn.Parameter(arg, requires_grad=False) if i in (weights or ()) else arg
        for i, arg in enumerate(args)
    )
    return record(traced(function, *args, weights=weights), args)


def by_dynamo(
    function: Callable[..., Any] | torch.nn.Module,
    *calls: tuple[Any, ...],
    dynamic: bool | None = None,
) -> list[tuple[DynamoGraph, tuple[Any, ...]]]:
    """Call a compiled function; return each run of each graph with its arguments."""
    torch._dynamo.reset()
    runs: list[tuple[DynamoGraph, tuple[Any, ...]]] = []
    names = {}
    if isinstance(function, torch.nn.Module):
        names = {id(p): name for name, p in function.named_parameters()}

    def backend(module: torch.fx.GraphModule, example: Sequence[Any]) -> Callable[..., Any]:
        graph = DynamoGraph(module, example, names, "graph")

        def run(*args: Any) -> Any:
            runs.append((graph, args))
            return module(*args)

        return run

    compiled = torch.compile(function, backend=backend, dynamic=dynamic)
    with torch.no_grad():
        for args in calls:
            compiled(*args)
    torch._dynamo.reset()
    return runs


def replay(graph: TaskGraph, args: Sequence[Any]) -> list[Any]:
    """Run a taskgraph; host outputs come back as None."""
    bases: dict[int, tuple[torch.Tensor, int]] = {}
    for buffer in graph.buffers:
        if buffer.kind is BufferKind.CONSTANT:
            held = torch.frombuffer(bytearray(buffer.payload or b"\0"), dtype=torch.uint8)
        else:
            held = torch.full((max(1, buffer.nbytes),), 0xFF, dtype=torch.uint8)
        bases[buffer.id] = (held, 0)
    for given in graph.inputs:
        view, arg = graph.tensors[given.tensor], args[given.position]
        assert (tuple(arg.shape), arg.stride()) == (view.shape, view.stride)
        bases[view.buffer] = (arg, (arg.storage_offset() - view.offset) * arg.element_size())

    def tensor(index: int) -> torch.Tensor:
        view = graph.tensors[index]
        return view_of(bases[view.buffer][0], view, bases[view.buffer][1])

    with torch.no_grad():
        for task in graph.tasks:
            bound = bind(task, tensor, [], into_place=True)
            bound.call(*bound.args, **bound.kwargs)
    found: list[Any] = []
    for output in graph.outputs:
        if output.position is not None:
            found.append(args[output.position])
        else:
            found.append(None if output.tensor is None else tensor(output.tensor))
    return found
