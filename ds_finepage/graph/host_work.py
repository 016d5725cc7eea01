"""Counts the work of a task that the host computes with what lies in its memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ds_finepage.graph.arguments import Ref
from ds_finepage.graph.attention import ATTENTION_FLOPS, HOST_ATTENTION
from ds_finepage.graph.packed import FEW_ROWS, PACKED_PRODUCTS
from ds_finepage.graph.taskgraph import PACKED_ITEMSIZE, Task, TaskGraph, TensorView

UNPACKING_FLOPS = 4
"""Arithmetic of a product that unpacks in registers, over that of a plain one. Measured: 27e9
flops/s on a core with AVX-512, whose plain products have about 100e9."""


def host_work(graph: TaskGraph, task: Task) -> tuple[int, int]:
    """Return the bytes that a task reads and writes on the host, and its arithmetic.

    With few rows of activations the host unpacks in registers, where the device unpacks into its
    memory; see ``packing/native.py``. Each row needs one of several matrices.
    """
    if task.op == HOST_ATTENTION:
        return task.moved_bytes, ATTENTION_FLOPS * task.flops
    if task.op not in PACKED_PRODUCTS:
        return task.moved_bytes, task.flops
    rows, *parts = (graph.tensors[a.tensor] for a in task.args[:4] if isinstance(a, Ref))
    num_rows = math.prod(rows.shape[:-1])
    if num_rows > FEW_ROWS:
        return task.moved_bytes, task.flops
    num_matrices = parts[0].shape[0] if len(parts[0].shape) > 2 else 1
    made = [graph.tensors[t] for t in task.results if t is not None]
    read_bytes = _bytes(parts) * min(num_rows, num_matrices) // num_matrices
    return read_bytes + _bytes([rows, *made]), UNPACKING_FLOPS * task.flops


def _bytes(tensors: Iterable[TensorView]) -> int:
    return sum(math.prod(t.shape) * PACKED_ITEMSIZE[t.dtype] for t in tensors)
