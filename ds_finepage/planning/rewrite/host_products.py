"""Gives products to the host: TaskGraph -> TaskGraph.

The host multiplies by rows of a weight where the master lies, so these rows take no device bytes
and no copies. They are a buffer of kind MASTER. The task that reads them runs in the lane of the
host, beside the task that makes the other columns of the result on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.rewrite.split import Divisible, cut_weights


def host_bytes(graph: TaskGraph) -> int:
    """Return the bytes of weights and rows that the host reads in a pass; of experts, the most."""
    masters = [b for b in graph.buffers if b.kind is BufferKind.MASTER]
    if not masters:
        return 0
    weights = (
        dataclasses.replace(b, kind=BufferKind.WEIGHT) if b.kind is BufferKind.MASTER else b
        for b in graph.buffers
    )
    known = routes(dataclasses.replace(graph, buffers=tuple(weights)))
    return sum(known[b.id].most_bytes(b.nbytes) if b.id in known else b.nbytes for b in masters)


def with_host_rows(
    graph: TaskGraph, units: Iterable[Divisible], rows: Mapping[int, int]
) -> TaskGraph:
    """Let the host multiply by the last rows of weights.

    Args:
        graph: The pass.
        units: Weights of it that can be cut.
        rows: Weight -> how many of its last rows; all of them where it stays whole.
    """
    units = [unit for unit in units if rows.get(unit.buffer)]
    firsts = {unit.buffer: unit.num_rows - rows[unit.buffer] for unit in units}
    masters = {
        (graph.buffers[b].name, graph.buffers[b].offset + firsts[unit.buffer] * row_bytes)
        for unit in units
        for b, row_bytes in unit.parts
    }
    cut = cut_weights(graph, {b: (0, first) for b, first in firsts.items() if first}, units)
    buffers = (
        dataclasses.replace(b, kind=BufferKind.MASTER)
        if b.kind is BufferKind.WEIGHT and b.gather is None and (b.name, b.offset) in masters
        else b
        for b in cut.buffers
    )
    return dataclasses.replace(cut, buffers=tuple(buffers))
