"""Routed weights: the pass itself chooses which slices of them it uses.

The matrices of a layer's experts are slices of one weight. If they are packed, their numbers,
scales and minima are a weight each, and an expert has a slice of each of them. After the router has
run, a tensor of the pass holds the slices in use. A reload that waits for the router brings in only
those slices. The bytes of all slices stay reserved, because each of them may be chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ds_finepage.graph.packed import PACKED_GROUPED
from ds_finepage.graph.taskgraph import PACKED_ITEMSIZE, BufferKind, Ref, Task, TaskGraph

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
    last_writer: dict[int, int] = {}
    found: dict[int, Route] = {}
    for task in graph.tasks:
        found.update((route.buffer, route) for route in _routes(graph, task, last_writer))
        for buffer in (*task.writes, *task.touches):
            last_writer[buffer] = task.index
    return {b: route for b, route in found.items() if len(graph.uses[b]) == 1}


def _routes(graph: TaskGraph, task: Task, last_writer: dict[int, int]) -> Iterator[Route]:
    named = _named(graph, task)
    if named is None:
        return
    rows, weights, tells = named
    table = graph.tensors[tells].buffer
    if graph.buffers[table].kind is not BufferKind.ACTIVATION or table not in last_writer:
        return
    for weight in weights:
        view = graph.tensors[weight]
        buffer = graph.buffers[view.buffer]
        if buffer.kind is not BufferKind.WEIGHT or len(view.shape) < 2:
            continue
        if graph.num_parts(buffer) > 1:  # the choice of one rank is not that of the others
            continue
        num_slices, numel = view.shape[0], math.prod(view.shape)
        is_whole = view.offset == 0 and buffer.nbytes == numel * PACKED_ITEMSIZE.get(view.dtype, 0)
        if not is_whole or view.stride[0] * num_slices != numel or rows >= num_slices:
            continue
        yield Route(
            buffer=buffer.id,
            task=task.index,
            tensor=tells,
            source=last_writer[table],
            is_ends=task.op != LOOKUP,
            num_slices=num_slices,
            most_used=rows,
        )


class Groups(NamedTuple):
    """A tensor of rows that are sorted by group, and one that holds the end of each group."""

    rows: int
    ends: int


def groups_of(task: Task) -> Groups | None:
    """Return the groups of rows that a task works on; None if it has no groups."""
    if task.op == PACKED_GROUPED:
        rows, ends = task.args[0], task.args[4]
    elif task.op in GROUPED_PRODUCTS and len(task.args) > 1:
        rows = task.args[0]
        ends = task.args[2] if len(task.args) > 2 else dict(task.kwargs).get("offs")
    else:
        return None
    if not isinstance(rows, Ref) or not isinstance(ends, Ref):
        return None
    return Groups(rows=rows.tensor, ends=ends.tensor)


def _named(graph: TaskGraph, task: Task) -> tuple[int, list[int], int] | None:
    """Return the most slices that a task uses, the weights, and the tensor that names them."""
    groups = groups_of(task)
    if groups is not None:
        given = task.args[1:4] if task.op == PACKED_GROUPED else task.args[1:2]
        weights = [value.tensor for value in given if isinstance(value, Ref)]
        shape = graph.tensors[groups.rows].shape
        if len(shape) == 2 and all(len(graph.tensors[w].shape) == 3 for w in weights):
            return shape[0], weights, groups.ends
    if task.op == LOOKUP and isinstance(task.args[1], tuple) and len(task.args[1]) == 1:
        weight, numbers = task.args[0], task.args[1][0]
        if isinstance(weight, Ref) and isinstance(numbers, Ref):
            indices = graph.tensors[numbers.tensor]
            # The shape of a boolean mask does not say how many slices it selects.
            if indices.dtype in ("int32", "int64"):
                return math.prod(indices.shape), [weight.tensor], numbers.tensor
    return None
