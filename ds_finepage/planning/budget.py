"""The device bytes that a budget pays for outside the arena."""

from __future__ import annotations

from math import prod

from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.units import align_up

HOST_PROGRAM_SLACK_BYTES = 64 * 1024

SELECTED_PARTS = 4
"""Beam search puts the rows of a KV cache with room into another order in so many parts."""


def non_arena_bytes(graph: TaskGraph, alignment: int) -> int:
    """Return the device bytes that a pass needs outside the arena.

    These are its inputs, outputs, KV cache and constants, the largest op workspace, and the tensors
    that the calling program makes from them. ``generate`` makes a few copies of token ids and masks
    (inputs of integers or booleans), and one row of logits in float32 with two copies; the meter in
    the tests holds it to that. Beam search needs :func:`selected_bytes` more.
    """
    external = callers = row = 0
    returned = {graph.tensors[o.tensor] for o in graph.outputs if o.tensor is not None}
    counted = {t.buffer for t in graph.tensors if t.dtype == "bool" or "int" in t.dtype}
    for buffer in graph.buffers:
        if not buffer.kind.is_paged and buffer.kind is not BufferKind.HOST:
            external += align_up(buffer.nbytes, alignment)
        if buffer.kind is BufferKind.INPUT and buffer.id in counted:
            callers += buffer.nbytes
    for view in returned:
        if graph.buffers[view.buffer].kind is BufferKind.HOST:
            continue  # rows of a KV cache, which the caller keeps in host memory
        if len(view.shape) >= 2 and view.shape[-2]:
            row = max(row, 4 * prod(view.shape) // view.shape[-2])
    return external + graph.workspace_bytes + 4 * callers + 3 * row + HOST_PROGRAM_SLACK_BYTES


def selected_bytes(graph: TaskGraph) -> int:
    """Return the bytes that beam search needs to put the rows of a KV cache into another order.

    It copies the keys or the values of one layer at a time: those with room behind them in parts,
    and others at once. The rows that a pass replaces are gone by then.
    """
    found: dict[BufferKind, list[int]] = {kind: [] for kind in BufferKind}
    for tensor in (*(i.tensor for i in graph.inputs), *(o.tensor for o in graph.outputs)):
        view = None if tensor is None else graph.tensors[tensor]
        if view is not None and len(view.shape) == 4:  # (batch, heads, tokens, width)
            buffer = graph.buffers[view.buffer]
            found[buffer.kind].append(buffer.nbytes)
    given, made = found[BufferKind.INPUT], found[BufferKind.OUTPUT]
    whole = max(made) - sum(given) if made else max(given, default=0)
    return max(whole, -(-max(found[BufferKind.STATE], default=0) // SELECTED_PARTS))
