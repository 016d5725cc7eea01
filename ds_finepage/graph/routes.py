"""Weights of which a pass may use a part that it works out itself.

The matrices of a layer's experts are slices of one weight. Which of them are used is known when the
router has run: a tensor of the pass tells. A reload that waits for that task brings in the used
slices alone; the bytes of all of them stay reserved, for any may be used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_finepage.graph.taskgraph import ITEMSIZE, BufferKind, Ref, Task, TaskGraph

GROUPED_PRODUCTS = frozenset(
    {"aten._grouped_mm.default", "transformers.grouped_mm_fallback.default"}
)
"""Products of rows, sorted by group, with each group's matrix of the second argument; the third
(``offs``) holds where each group ends, and a group without rows reads no matrix."""

LOOKUP = "aten.index.Tensor"
"""Reads the slices of its first argument that the indices name."""


@dataclass(frozen=True, slots=True)
class Route:
    """How the used slices of a weight are found.

    Attributes:
        buffer: The weight.
        task: The one task that uses it.
        tensor: The tensor that tells which slices that is.
        source: The task that makes it.
        is_ends: True where it holds the ends of groups of rows, False where the slices' numbers.
        num_slices: Slices of the weight, of equal size, one behind the other.
        most_used: So many of them are used at most.
    """

    buffer: int
    task: int
    tensor: int
    source: int
    is_ends: bool
    num_slices: int
    most_used: int

    def most_bytes(self, nbytes: int) -> int:
        """Return the bytes that are used at most, of a weight of ``nbytes``."""
        return nbytes // self.num_slices * self.most_used


def routes(graph: TaskGraph) -> dict[int, Route]:
    """Find the weights of which a pass uses fewer slices than there are, whatever they turn out."""
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
        ends: The tensor that tells where each group ends.
    """

    rows: int
    ends: int


def groups_of(task: Task) -> Groups | None:
    """Return the groups of rows that a task works on; None where there are none."""
    if task.op not in GROUPED_PRODUCTS or len(task.args) < 2:
        return None
    rows = task.args[0]
    ends = task.args[2] if len(task.args) > 2 else dict(task.kwargs).get("offs")
    if not isinstance(rows, Ref) or not isinstance(ends, Ref):
        return None
    return Groups(rows=rows.tensor, ends=ends.tensor)


def _named(graph: TaskGraph, task: Task) -> tuple[int, int, int] | None:
    """Return how many slices a task uses at most, the weight, and the tensor that tells them."""
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
            # A mask of booleans selects too, and does not say so by its size.
            if indices.dtype in ("int32", "int64"):
                return math.prod(indices.shape), weight.tensor, numbers.tensor
    return None
