"""The device bytes that a budget pays for outside the arena."""

from __future__ import annotations

from math import prod

from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.units import align_up

HOST_PROGRAM_SLACK_BYTES = 64 * 1024

SELECTED_PARTS = 4
"""Beam search puts the rows of a KV cache into another order, one such part of a layer's keys or
values at a time."""


def non_arena_bytes(graph: TaskGraph, alignment: int) -> int:
    """Return the device bytes that a pass needs outside the arena.

    These are its inputs, outputs, KV cache and constants, the largest op workspace, and the tensors
    that the calling program makes from them. ``generate`` makes a few copies of token ids and masks
    (inputs of integers or booleans), and one row of logits in float32 with two copies. Beam search
    puts the rows of a KV cache into another order, in parts. The meter in the tests holds both to
    that.
    """
    external = callers = row = part = 0
    returned = {graph.tensors[o.tensor] for o in graph.outputs if o.tensor is not None}
    counted = {t.buffer for t in graph.tensors if t.dtype == "bool" or "int" in t.dtype}
    for buffer in graph.buffers:
        if not buffer.kind.is_paged and buffer.kind is not BufferKind.HOST:
            external += align_up(buffer.nbytes, alignment)
        if buffer.kind is BufferKind.INPUT and buffer.id in counted:
            callers += buffer.nbytes
        if buffer.kind is BufferKind.STATE:
            part = max(part, buffer.nbytes // SELECTED_PARTS)
    for view in returned:
        if graph.buffers[view.buffer].kind is BufferKind.HOST:
            continue  # rows of a KV cache, which the caller keeps in host memory
        if len(view.shape) == 4:  # (batch, heads, tokens, width): the first rows of a KV cache
            part = max(part, graph.buffers[view.buffer].nbytes // SELECTED_PARTS)
        if len(view.shape) >= 2 and view.shape[-2]:
            row = max(row, 4 * prod(view.shape) // view.shape[-2])
    callers_bytes = 4 * callers + 3 * row + part
    return external + graph.workspace_bytes + callers_bytes + HOST_PROGRAM_SLACK_BYTES
