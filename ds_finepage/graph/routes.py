"""Routed weights: the pass itself chooses which slices of them it uses.

The matrices of a layer's experts are slices of one weight. After the router has run, a tensor of
the pass holds the slices in use. A reload that waits for the router brings in only those slices.
The bytes of all slices stay reserved, because each of them may be chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_finepage.graph.taskgraph import ITEMSIZE, BufferKind, Ref, Task, TaskGraph

GROUPED_PRODUCTS = frozenset(
    {"aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"}
)
"""Products of rows that are sorted by group. The second argument holds one matrix a group. The
third (``offs``) holds the end of each group; a group without rows reads no matrix."""

LOOKUP = "aten.index.Tensor"
"""Reads slices of its first argument, by index."""


@dataclass(frozen=True, slots=True)
class Route:
    """How to find the used slices of a weight.

    Attributes:
        buffer: The weight.
        task: The one task that uses it.
        tensor: The tensor that names the used slices.
        source: The task that makes this tensor.
        is_ends: Whether the tensor holds the ends of groups of rows; else it holds slice numbers.
        num_slices: Number of slices of the weight; they are contiguous and of equal size.
        most_used: The most slices that the task may use.
    """

    buffer: int
    task: int
    tensor: int
    source: int
    is_ends: bool
    num_slices: int
    most_used: int

    def most_bytes(self, nbytes: int) -> int:
        """Return the most bytes that the task may use of a weight of ``nbytes``."""
        return nbytes // self.num_slices * self.most_used


def routes(graph: TaskGraph) -> dict[int, Route]:
    """Find the weights with more slices than a pass ever uses, by buffer id."""
    times_used = [0] * len(graph.buffers)
    last_writer: dict[int, int] = {}
    found: dict[int, Route] = {}
    for task in graph.tasks:
        route = _route(graph, task, last_writer)
        if route is not None:
            found[route.buffer] = route
        for buffer in task.buffers:
            times_used[buffer] += 1
        for buffer in (*task.writes, *task.touches):
            last_writer[buffer] = task.index
    return {b: route for b, route in found.items() if times_used[b] == 1}


def _route(graph: TaskGraph, task: Task, last_writer: dict[int, int]) -> Route | None:
    named = _named(graph, task)
    if named is None:
        return None
    rows, weight, tells = named
    view = graph.tensors[weight]
    buffer, table = graph.buffers[view.buffer], graph.tensors[tells].buffer
    if buffer.kind is not BufferKind.WEIGHT or len(view.shape) < 2:
        return None
    if graph.buffers[table].kind is not BufferKind.ACTIVATION or table not in last_writer:
        return None
    num_slices, numel = view.shape[0], math.prod(view.shape)
    is_whole = view.offset == 0 and buffer.nbytes == numel * ITEMSIZE.get(view.dtype, 0)
    if not is_whole or view.stride[0] * num_slices != numel or rows >= num_slices:
        return None
    return Route(
        buffer=buffer.id,
        task=task.index,
        tensor=tells,
        source=last_writer[table],
        is_ends=task.op in GROUPED_PRODUCTS,
        num_slices=num_slices,
        most_used=rows,
    )


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows that are sorted by group.

    Attributes:
        rows: The tensor of rows.
        ends: The tensor that holds the end of each group.
    """

    rows: int
    ends: int


def groups_of(task: Task) -> Groups | None:
    """Return the groups of rows that a task works on; None if it has no groups."""
    if task.op not in GROUPED_PRODUCTS or len(task.args) < 2:
        return None
    rows = task.args[0]
    ends = task.args[2] if len(task.args) > 2 else dict(task.kwargs).get("offs")
    if not isinstance(rows, Ref) or not isinstance(ends, Ref):
        return None
    return Groups(rows=rows.tensor, ends=ends.tensor)


def _named(graph: TaskGraph, task: Task) -> tuple[int, int, int] | None:
    """Return the most slices that a task uses, the weight, and the tensor that names them."""
    groups = groups_of(task)
    if groups is not None:
        weight = task.args[1]
        if isinstance(weight, Ref):
            shape, matrices = graph.tensors[groups.rows].shape, graph.tensors[weight.tensor].shape
            if len(shape) == 2 and len(matrices) == 3:
                return shape[0], weight.tensor, groups.ends
    if task.op == LOOKUP and isinstance(task.args[1], tuple) and len(task.args[1]) == 1:
        weight, numbers = task.args[0], task.args[1][0]
        if isinstance(weight, Ref) and isinstance(numbers, Ref):
            indices = graph.tensors[numbers.tensor]
            # The shape of a boolean mask does not say how many slices it selects.
            if indices.dtype in ("int32", "int64"):
                return math.prod(indices.shape), weight.tensor, numbers.tensor
    return None
