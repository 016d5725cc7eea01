"""The bytes of the weights of each layer that a plan keeps on the device, and that it lacks."""

from __future__ import annotations

from dataclasses import dataclass

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import BufferKind, block_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """One layer, or one module outside the layers.

    Attributes:
        name: "model.layers.3", or a module such as "lm_head".
        resident_bytes: Bytes of weights that stay on the device from pass to pass.
        missing_bytes: Bytes of weights that each pass reloads.
    """

    name: str
    resident_bytes: int
    missing_bytes: int

    @property
    def label(self) -> str:
        """Its name in a picture: "3", or "lm_head"."""
        return self.name.rpartition(".")[2]


def bytes_by_layer(memgraph: MemGraph) -> list[LayerBytes]:
    """Return the layers of a plan in the order of the model.

    A layer is the block of modules up to the first number in the names of its weights. Rows of a
    KV cache do not count.

    Args:
        memgraph: The plan.
    """
    graph = memgraph.graph
    resident = {residency.buffer for residency in memgraph.entry} - {*memgraph.lost}
    found: dict[str, list[int]] = {}  # by name: the resident bytes, the missing bytes
    for buffer in graph.buffers:
        if buffer.kind is BufferKind.WEIGHT and not graph.is_handed(buffer):
            sums = found.setdefault(block_of(buffer.name) or buffer.name, [0, 0])
            sums[buffer.id not in resident] += buffer.nbytes
    return [
        LayerBytes(name=name, resident_bytes=kept, missing_bytes=missing)
        for name, (kept, missing) in found.items()
    ]
