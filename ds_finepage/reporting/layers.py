"""The bytes of the weights of each layer that a plan keeps on the device, and that it lacks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import BufferKind

_NUMBERED = re.compile(r"(.*?)\.(\d+)\.")


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
    """Return the layers of a plan in the order of their first use.

    A layer is the block of modules up to the first number in the names of its weights. Rows of a
    KV cache do not count.

    Args:
        memgraph: The plan.
    """
    graph = memgraph.graph
    resident = {residency.buffer for residency in memgraph.entry} - {*memgraph.lost}
    found: dict[str, list[int]] = {}
    for task in graph.tasks:
        for buffer in (graph.buffers[b] for b in task.reads):
            if buffer.kind is BufferKind.WEIGHT and not graph.is_handed(buffer):
                found.setdefault(_layer_of(buffer.name), []).append(buffer.id)
    layers = []
    for name, buffers in found.items():
        of_layer = {b: graph.buffers[b].nbytes for b in buffers}
        kept = sum(nbytes for b, nbytes in of_layer.items() if b in resident)
        layers.append(
            LayerBytes(
                name=name,
                resident_bytes=kept,
                missing_bytes=sum(of_layer.values()) - kept,
            )
        )
    return layers


def _layer_of(name: str) -> str:
    """Return the layer of a weight: the name up to its first number, or its module."""
    match = _NUMBERED.match(name)
    return f"{match[1]}.{match[2]}" if match else name.rpartition(".")[0] or name
