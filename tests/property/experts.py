"""Taskgraphs of layers with experts, as capture writes them."""

from __future__ import annotations

from collections.abc import Sequence

from ds_finepage.graph.taskgraph import BufferKind, GraphInput, GraphOutput, TaskGraph
from tests.property.matmul_chains import ITEMSIZE, ChainBuilder

PRODUCT = "transformers.grouped_mm_fallback.default"


def layers_of_experts(
    *, num_layers: int = 3, num_experts: int | Sequence[int] = 8, rows: int = 2, width: int = 64
) -> TaskGraph:
    """Build ``dense product -> router -> two grouped products`` for each layer, in float32.

    Args:
        num_layers: Layers.
        num_experts: Matrices in each of a layer's two weights of experts; or one number a layer.
        rows: Rows that the router sends to experts; each goes to one.
        width: Rows and columns of every matrix.
    """
    builder = ChainBuilder()
    row = builder.matrix(BufferKind.INPUT, rows, width, "row")
    given = row
    numbers = [num_experts] * num_layers if isinstance(num_experts, int) else num_experts
    for layer, number in enumerate(numbers):
        dense = builder.matrix(BufferKind.WEIGHT, width, width, f"{layer}.dense")
        ends_buffer = builder.buffer(BufferKind.ACTIVATION, number * 4)
        ends = builder.tensor(ends_buffer, (number,), (1,), "int32")
        mixed = builder.matrix(BufferKind.ACTIVATION, rows, width)
        builder.task("aten.mm.default", [row, dense], mixed)
        builder.task("router", [mixed], ends)
        row = mixed
        for name in ("up", "down"):
            nbytes = number * width * width * ITEMSIZE
            buffer = builder.buffer(BufferKind.WEIGHT, nbytes, f"{layer}.{name}")
            weight = builder.tensor(buffer, (number, width, width), (width * width, 1, width))
            made = builder.matrix(BufferKind.ACTIVATION, rows, width)
            builder.task(PRODUCT, [row, weight, ends], made)
            row = made
    out = builder.matrix(BufferKind.OUTPUT, rows, width, "out")
    builder.task("aten.mul.Tensor", [row, row], out)
    return TaskGraph(
        name="experts",
        buffers=tuple(builder.buffers),
        tensors=tuple(builder.tensors),
        tasks=tuple(builder.tasks),
        inputs=(GraphInput(0, given),),
        outputs=(GraphOutput(tensor=out),),
    )
