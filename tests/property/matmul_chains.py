"""Taskgraphs of matrix products, as capture writes them, for everything that cuts weights."""

from __future__ import annotations

import random

from ds_finepage.graph.taskgraph import (
    Buffer,
    BufferKind,
    GraphInput,
    GraphOutput,
    Ref,
    Task,
    TaskGraph,
    TensorView,
)

ITEMSIZE = 4


class ChainBuilder:
    """Builds ``ids -> embedding -> product -> ... -> product -> output``, all in float32."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.tensors: list[TensorView] = []
        self.tasks: list[Task] = []

    def buffer(self, kind: BufferKind, nbytes: int, name: str = "") -> int:
        self.buffers.append(Buffer(len(self.buffers), kind, nbytes, name))
        return len(self.buffers) - 1

    def tensor(
        self, buffer: int, shape: tuple[int, ...], stride: tuple[int, ...], dtype: str = "float32"
    ) -> int:
        self.tensors.append(TensorView(len(self.tensors), buffer, dtype, shape, stride))
        return len(self.tensors) - 1

    def matrix(self, kind: BufferKind, rows: int, columns: int, name: str = "") -> int:
        """Make a buffer with a row-major matrix; return the matrix."""
        made = self.buffer(kind, rows * columns * ITEMSIZE, name)
        return self.tensor(made, (rows, columns), (columns, 1))

    def task(self, op: str, operands: list[int], result: int) -> None:
        reads = {self.tensors[t].buffer for t in operands}
        self.tasks.append(
            Task(
                len(self.tasks),
                op,
                label=f"layer{len(self.tasks)}",
                args=tuple(Ref(t) for t in operands),
                results=(result,),
                reads=tuple(sorted(reads)),
                writes=(self.tensors[result].buffer,),
                flops=1000,
                moved_bytes=sum(self.buffers[b].nbytes for b in reads),
            )
        )


def matmul_chain(
    widths: list[int],
    *,
    num_rows: int = 1,
    vocabulary: int = 50,
    with_bias: bool = False,
    last_kind: BufferKind = BufferKind.OUTPUT,
) -> TaskGraph:
    """Build a chain whose k-th product takes ``widths[k]`` to ``widths[k + 1]`` features."""
    chain = ChainBuilder()
    ids = chain.tensor(
        chain.buffer(BufferKind.INPUT, 8 * num_rows, "ids"), (num_rows,), (1,), "int64"
    )
    table = chain.matrix(BufferKind.WEIGHT, vocabulary, widths[0], "table")
    x = chain.matrix(BufferKind.ACTIVATION, num_rows, widths[0])
    chain.task("aten.embedding.default", [table, ids], x)
    for i, (inner, outer) in enumerate(zip(widths, widths[1:], strict=False)):
        weight = chain.buffer(BufferKind.WEIGHT, inner * outer * ITEMSIZE, f"w{i}")
        transposed = chain.tensor(weight, (inner, outer), (1, inner))
        is_last = i == len(widths) - 2
        y = chain.matrix(last_kind if is_last else BufferKind.ACTIVATION, num_rows, outer)
        if with_bias:
            bias = chain.tensor(
                chain.buffer(BufferKind.WEIGHT, outer * ITEMSIZE, f"b{i}"), (outer,), (1,)
            )
            chain.task("aten.addmm.default", [bias, x, transposed], y)
        else:
            chain.task("aten.mm.default", [x, transposed], y)
        x = y
    return TaskGraph(
        "chain",
        tuple(chain.buffers),
        tuple(chain.tensors),
        tuple(chain.tasks),
        (GraphInput(0, ids),),
        (GraphOutput(tensor=x),),
    )


def random_chain(rng: random.Random) -> TaskGraph:
    """Draw a chain of 1 to 8 products."""
    widths = [rng.choice([8, 16, 48, 130, 256]) for _ in range(rng.randint(2, 9))]
    return matmul_chain(widths, num_rows=rng.randint(1, 4), with_bias=rng.random() < 0.5)
