"""Steps of a model that has nothing but attention, with its KV cache in host memory."""

from __future__ import annotations

import dataclasses
from typing import Any

from ds_finepage.graph.taskgraph import (
    TO_HOST,
    Buffer,
    BufferKind,
    GraphInput,
    GraphOutput,
    Ref,
    Task,
    TaskGraph,
    TensorView,
)

BATCH, HEADS, WIDTH = 2, 4, 8
FLASH = "aten._scaled_dot_product_flash_attention_for_cpu.default"
EFFICIENT = "aten._scaled_dot_product_efficient_attention.default"


class Layers:
    """Builds a taskgraph; a layer reads the result of the one before."""

    def __init__(self, num_live: int = 30, *, shared: int = 2, num_new: int = 1) -> None:
        self.num_live, self.shared, self.num_new = num_live, shared, num_new
        self.buffers: list[Buffer] = []
        self.tensors: list[TensorView] = []
        self.tasks: list[Task] = []
        self.sent: list[int] = []
        self.given: list[int] = []
        self.states = (BATCH, HEADS, num_new, WIDTH)
        self.out = self.tensor(self.states, BufferKind.INPUT)
        self.given.append(self.out)

    def tensor(self, shape: tuple[int, ...], kind: BufferKind, **fields: Any) -> int:
        """Add a dense tensor with a buffer of its own."""
        numel = 1
        stride: list[int] = []
        for size in reversed(shape):
            stride.insert(0, numel)
            numel *= size
        self.buffers.append(Buffer(len(self.buffers), kind, numel * 4, **fields))
        return self.view(self.buffers[-1].id, shape, tuple(stride))

    def view(
        self, buffer: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
    ) -> int:
        """Add a view of a buffer."""
        view = TensorView(len(self.tensors), buffer, "float32", shape, stride, offset)
        self.tensors.append(view)
        return view.id

    def task(
        self,
        op: str,
        args: tuple[Any, ...],
        results: tuple[int, ...],
        reads: list[int],
        **fields: Any,
    ) -> None:
        """Add a task; tensors are named, not buffers."""
        made = sorted({self.tensors[t].buffer for t in results})
        used = sorted({self.tensors[t].buffer for t in reads})
        self.tasks.append(
            Task(len(self.tasks), op, "attn", args, results=results, reads=tuple(used),
                 writes=tuple(made), moved_bytes=1000, **fields)
        )  # fmt: skip

    def rows(self, name: str) -> tuple[int, int]:
        """Bring in keys or values and write the new ones behind them; return buffer and view."""
        row = (BATCH, self.shared, WIDTH)
        per_token = BATCH * self.shared * WIDTH
        given = self.tensor((self.num_live, *row), BufferKind.HOST)
        self.given.append(given)
        made = self.tensor((self.num_new, *row), BufferKind.ACTIVATION)
        num_all = self.num_live + self.num_new
        whole = self.tensor((num_all + 2, *row), BufferKind.WEIGHT, name=name, gather=given)
        held = self.tensors[whole].buffer
        stride = (per_token, self.shared * WIDTH, WIDTH, 1)
        behind = self.view(held, (self.num_new, *row), stride, self.num_live * per_token)
        sent = self.tensor((self.num_new, *row), BufferKind.HOST)
        self.sent.append(sent)
        self.task("aten.add.Tensor", (Ref(self.out),), (made,), [self.out])
        self.task("aten.copy_.default", (Ref(behind), Ref(made)), (behind,), [behind, made])
        self.task(TO_HOST, (Ref(made),), (sent,), [made])
        shape = (BATCH, self.shared, num_all, WIDTH)
        return held, self.view(held, shape, (self.shared * WIDTH, WIDTH, per_token, 1))

    def attend(self, *, mask: int | None = None, op: str = FLASH, **named: Any) -> None:
        """Add a layer."""
        layer = len(self.sent) // 2
        states = [self.rows(f"KV rows {2 * layer + n}")[1] for n in range(2)]
        query, out = self.out, self.tensor(self.states, BufferKind.ACTIVATION)
        sums = self.tensor((BATCH, HEADS, self.num_new), BufferKind.ACTIVATION)
        args: tuple[Any, ...] = tuple(map(Ref, (query, *states)))
        masks = [] if mask is None else [mask]
        if op == EFFICIENT:
            args = (*args, *map(Ref, masks), False)
        elif masks:
            named["attn_mask"] = Ref(masks[0])
        kwargs = tuple({**named, "scale": 0.5}.items())
        reads = [query, *states, *masks]
        self.task(op, args, (out, sums), reads, kwargs=kwargs, flops=100)
        self.out = out

    def multiply(self) -> None:
        """Multiply the result of a layer by a matrix of its own."""
        depth, num_rows = HEADS * WIDTH, BATCH * self.num_new
        name = f"w{len(self.tasks)}"
        weight = self.tensor((depth, depth), BufferKind.WEIGHT, name=name)
        across = self.view(self.tensors[weight].buffer, (depth, depth), (1, depth))
        rows = self.view(self.tensors[self.out].buffer, (num_rows, depth), (depth, 1))
        made = self.tensor((num_rows, depth), BufferKind.ACTIVATION)
        self.task("aten.mm.default", (Ref(rows), Ref(across)), (made,), [rows, across], flops=100)
        stride = (depth, WIDTH, depth, 1)
        self.out = self.view(self.tensors[made].buffer, self.states, stride)

    def graph(self) -> TaskGraph:
        """Return the pass: it gives its last result back, and the new rows."""
        inputs = tuple(GraphInput(n, t) for n, t in enumerate(self.given))
        outputs = tuple(GraphOutput(tensor=t) for t in (self.out, *self.sent))
        last = self.tensors[self.out].buffer
        buffers = [
            dataclasses.replace(b, kind=BufferKind.OUTPUT) if b.id == last else b
            for b in self.buffers
        ]
        return TaskGraph(
            "steps", tuple(buffers), tuple(self.tensors), tuple(self.tasks), inputs, outputs
        )


def attended(num_layers: int = 1, num_live: int = 30, **sizes: int) -> TaskGraph:
    """Return a step of some layers."""
    layers = Layers(num_live, **sizes)
    for _ in range(num_layers):
        layers.attend()
    return layers.graph()
