"""Replaces embedding tables by the rows that a call looks up: TaskGraph -> TaskGraph."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Set
from dataclasses import dataclass
from math import prod

from ds_finepage.graph.taskgraph import (
    ITEMSIZE,
    Buffer,
    BufferKind,
    Ref,
    Task,
    TaskGraph,
    TensorView,
)
from ds_finepage.planning.liveness import live_activation_bytes
from ds_finepage.planning.rewrite.split import varies

EMBEDDING = "aten.embedding.default"


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A lookup that can be served from host memory."""

    table: TensorView
    indices: TensorView
    num_rows: int  # as many as there are indices

    def rows_bytes(self, graph: TaskGraph) -> int:
        """Return the bytes of the rows."""
        return self.num_rows * graph.buffers[self.table.buffer].nbytes // self.table.shape[0]


def looked_up_bytes(graph: TaskGraph) -> dict[int, int]:
    """Return the embedding tables that can give way to rows, with the bytes of these rows."""
    found: dict[int, int] = {}
    for lookup in filter(None, (_lookup(graph, task) for task in graph.tasks)):
        table = lookup.table.buffer
        found[table] = found.get(table, 0) + lookup.rows_bytes(graph)
    return found


def tables_to_leave(graph: TaskGraph, arena_bytes: int) -> frozenset[int]:
    """Return the embedding tables that should not give way to rows.

    Another op or lookup uses such a table too (a tied product), so it has to be reloaded anyway,
    and once is enough. If it has no room beside the activations, it would be reloaded for each
    use, so it gives way too.

    Args:
        graph: The pass.
        arena_bytes: Size of the arena.
    """
    room = arena_bytes - max(live_activation_bytes(graph, alignment=1), default=0)
    return frozenset(
        b
        for b in looked_up_bytes(graph)
        if len(graph.uses[b]) > 1 and graph.buffers[b].nbytes <= room
    )


def gather_rows(graph: TaskGraph, *, kept: Set[int] = frozenset()) -> TaskGraph:
    """Replace embedding tables by the rows that the call looks up.

    The host must know the indices before the pass, so they have to be inputs of the call. The table
    then stays in host memory. It is not replaced if the rows are as many bytes as the table.

    Args:
        graph: The pass.
        kept: Tables to leave alone.

    Returns:
        ``graph`` itself if nothing is replaced, so that callers can tell.
    """
    buffers, tensors, tasks = list(graph.buffers), list(graph.tensors), list(graph.tasks)
    for task in graph.tasks:
        lookup = _lookup(graph, task)
        if lookup is None or lookup.table.buffer in kept:
            continue
        table, indices, num_rows = lookup.table, lookup.indices, lookup.num_rows
        whole = graph.buffers[table.buffer]
        rows = Buffer(
            id=len(buffers),
            kind=BufferKind.WEIGHT,
            nbytes=lookup.rows_bytes(graph),
            name=whole.name,
            gather=indices.id,
        )
        numbers = Buffer(
            id=len(buffers) + 1,
            kind=BufferKind.CONSTANT,
            nbytes=8 * num_rows,
            payload=struct.pack(f"={num_rows}q", *range(num_rows)),
        )
        buffers += [rows, numbers]
        # A shorter call uses a corner of the numbers, so their strides stay those of the plan.
        shape, strides = indices.shape, _contiguous(indices.shape)
        first = len(tensors)
        tensors += [
            TensorView(first, rows.id, table.dtype, (num_rows, table.shape[1]), table.stride),
            TensorView(first + 1, numbers.id, "int64", shape, strides),
        ]
        tasks[task.index] = dataclasses.replace(
            task,
            args=(Ref(first), Ref(first + 1), *task.args[2:]),
            reads=tuple(sorted({*task.reads} - {table.buffer} | {rows.id, numbers.id})),
        )
    if len(buffers) == len(graph.buffers):
        return _without_unused_weights(graph)
    found = dataclasses.replace(
        graph, buffers=tuple(buffers), tensors=tuple(tensors), tasks=tuple(tasks)
    )
    return _without_unused_weights(found)


def _lookup(graph: TaskGraph, task: Task) -> _Lookup | None:
    """Return the lookup of a task; None if it is none, or cannot be served from host memory."""
    if task.op != EMBEDDING or len(task.args) < 2:
        return None
    weight, positions = task.args[0], task.args[1]
    if not isinstance(weight, Ref) or not isinstance(positions, Ref):
        return None
    table, indices = graph.tensors[weight.tensor], graph.tensors[positions.tensor]
    whole = graph.buffers[table.buffer]
    num_rows = int(prod(indices.shape))
    is_whole = (
        table.offset == 0
        and table.stride == (table.shape[1], 1)
        and whole.nbytes == prod(table.shape) * ITEMSIZE.get(table.dtype, 0)
        and not varies(*table.shape, *table.stride, table.offset)
    )
    if whole.kind is not BufferKind.WEIGHT or not is_whole or graph.num_parts(whole) > 1:
        return None  # a rank has the rows of its own part alone
    if indices.id not in {i.tensor for i in graph.inputs}:
        return None
    if graph.buffers[indices.buffer].kind is not BufferKind.INPUT:
        return None  # the pass changes them
    if not 0 < num_rows < table.shape[0]:
        return None
    return _Lookup(table, indices, num_rows)


def _without_unused_weights(graph: TaskGraph) -> TaskGraph:
    """Empty weights that no task uses, so that they take no bytes; ``graph`` if there are none."""
    unused = [b for b in graph.buffers if b.kind is BufferKind.WEIGHT and not graph.uses[b.id]]
    if not any(b.nbytes for b in unused):
        return graph
    buffers = list(graph.buffers)
    for buffer in unused:
        buffers[buffer.id] = dataclasses.replace(buffer, nbytes=0)
    return dataclasses.replace(graph, buffers=tuple(buffers))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
