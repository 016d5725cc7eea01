"""What a budget has to pay for beside the arena."""

from __future__ import annotations

from ds_finepage.graph.taskgraph import BufferKind, TaskGraph

HOST_PROGRAM_SLACK_BYTES = 64 * 1024


def non_arena_bytes(graph: TaskGraph, alignment: int) -> int:
    """Return the device bytes that a pass needs outside the arena.

    They are its inputs, outputs, KV cache and constants, the largest op workspace, and what the
    program that calls the model makes of them: token ids and masks (what is given as integers or
    booleans) about as large as those of the call a few times over, and one row of logits in
    float32 with two copies (what ``generate`` does; the meter in the tests holds it to that).
    """
    external = callers = row = 0
    returned = {graph.tensors[o.tensor] for o in graph.outputs if o.tensor is not None}
    counted = {t.buffer for t in graph.tensors if t.dtype == "bool" or "int" in t.dtype}
    for buffer in graph.buffers:
        if not buffer.kind.is_paged and buffer.kind is not BufferKind.HOST:
            external += -(-buffer.nbytes // alignment) * alignment
        if buffer.kind is BufferKind.INPUT and buffer.id in counted:
            callers += buffer.nbytes
    for view in returned:
        if len(view.shape) >= 2 and view.shape[-2]:
            numel = 1
            for size in view.shape:
                numel *= size
            row = max(row, 4 * numel // view.shape[-2])
    return external + graph.workspace_bytes + 4 * callers + 3 * row + HOST_PROGRAM_SLACK_BYTES
