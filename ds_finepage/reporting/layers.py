"""The bytes of the weights of each layer that a plan keeps on the device, and that it lacks."""

from __future__ import annotations

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import BufferKind, block_of


def bytes_by_layer(memgraph: MemGraph) -> dict[str, list[int]]:
    """Return the resident and the missing bytes of each layer, in the order of the model.

    A layer is the block of modules up to the first number in the names of its weights, such as
    "model.layers.3". Rows of a KV cache do not count.

    Args:
        memgraph: The plan.
    """
    graph = memgraph.graph
    resident = {residency.buffer for residency in memgraph.entry} - {*memgraph.lost}
    found: dict[str, list[int]] = {}
    for buffer in graph.buffers:
        if buffer.kind is BufferKind.WEIGHT and not graph.is_handed(buffer):
            sums = found.setdefault(block_of(buffer.name) or buffer.name, [0, 0])
            sums[buffer.id not in resident] += buffer.nbytes
    return found
