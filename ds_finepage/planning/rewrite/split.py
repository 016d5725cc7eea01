"""Cuts weights and the tasks that use them: TaskGraph -> TaskGraph.

A weight is the unit of residency. A plan of whole weights can miss the lower bound by the largest
of them, and its ring has to hold two of the largest. A matrix product can be cut along its output
features: each slice of rows of the weight makes its own columns of the result. The values are those
of the whole product, up to the order in which a library sums. A product of rows in groups is cut in
the same way: each slice has the same rows of the matrices of all groups.

Sizes that differ from call to call stay formulas. Only sizes that are the same in every call are
cut, and a slice begins at the same place in every row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ds_finepage.graph.routes import GROUPED_PRODUCTS
from ds_finepage.graph.taskgraph import (
    ITEMSIZE,
    JOIN,
    Buffer,
    BufferKind,
    ExpertMatrices,
    Length,
    Ref,
    Task,
    TaskGraph,
    TensorView,
)

MATMULS = {
    "aten.mm.default": 1,
    "aten.addmm.default": 2,
    **dict.fromkeys(sorted(GROUPED_PRODUCTS), 1),
}
"""Ops that can be cut, with the position of the weight among their arguments."""


@dataclasses.dataclass(frozen=True, slots=True)
class Divisible:
    """A weight that can be cut into slices of rows.

    Attributes:
        buffer: The weight.
        num_rows: Its rows, the output features.
        row_bytes: Bytes of one row, in all matrices.
        task: The one task that uses it.
        num_matrices: The matrices that the weight holds, one an expert.
    """

    buffer: int
    num_rows: int
    row_bytes: int
    task: int
    num_matrices: int = 1


def quantum(weight: Divisible) -> int:
    """Return the rows that are cut together, so that a slice is a good shape for a kernel."""
    return 64 if weight.num_rows >= 1024 else 16 if weight.num_rows >= 128 else 1


def divisible_weights(graph: TaskGraph) -> list[Divisible]:
    """Find the weights that can be cut, in the order of their use."""
    used = graph.uses
    found = (divisible_operand(graph, task) for task in graph.tasks)
    return [
        d
        for d in found
        if d is not None
        and graph.buffers[d.buffer].kind is BufferKind.WEIGHT
        and used[d.buffer] == (d.task,)
    ]


def divisible_operand(graph: TaskGraph, task: Task) -> Divisible | None:
    """Return the matrix of a product if it can be cut by rows, whoever uses or makes it."""
    at = _place_of_weight(task)
    if at is None:
        return None
    weight = task.args[at]
    (result,) = task.results
    if not isinstance(weight, Ref) or result is None:
        return None
    view, out = graph.tensors[weight.tensor], graph.tensors[result]
    buffer = graph.buffers[view.buffer]
    itemsize = ITEMSIZE.get(view.dtype)
    is_grouped = task.op in GROUPED_PRODUCTS
    if itemsize is None or len(view.shape) != 2 + is_grouped or len(out.shape) != 2:
        return None
    *several, depth, rows = view.shape
    num_matrices = several[0] if is_grouped else 1
    is_whole = (
        view.offset == 0
        and view.stride == (*(depth * rows for _ in several), 1, depth)
        and buffer.nbytes == num_matrices * depth * rows * itemsize
        and not varies(*view.shape, *view.stride, view.offset, buffer.nbytes)
    )
    if not is_whole or len(task.writes) != 1 or not _has_columns(graph, task, out, rows):
        return None
    return Divisible(buffer.id, rows, num_matrices * depth * itemsize, task.index, num_matrices)


def _place_of_weight(task: Task) -> int | None:
    """Return the position of the weight among a task's arguments; None if it cannot be cut."""
    at = MATMULS.get(task.op)
    if task.op in GROUPED_PRODUCTS:
        # Rows, matrices and the ends of the groups; no bias, and no other dtype.
        names = [name for name, value in task.kwargs if value is not None]
        has_more = any(value is not None for value in task.args[3:]) or names not in ([], ["offs"])
        return None if has_more or len(task.args) < 2 else at
    if at is None or task.kwargs or len(task.args) != at + 1:
        return None
    return at


def _has_columns(graph: TaskGraph, task: Task, out: TensorView, num_columns: int) -> bool:
    """Tell whether a product's result, and its bias, can be cut at the same columns in every call.

    The result must fill its buffer, so that the columns are all of it.
    """
    if out.offset != 0 or out.stride != (num_columns, 1):
        return False
    if varies(out.shape[-1], *out.stride, out.offset):
        return False
    if MATMULS[task.op] == 1:
        return True
    bias = graph.tensors[task.args[0].tensor]
    return bias.shape[-1:] == (num_columns,) and not varies(bias.shape[-1], bias.stride[-1])


def varies(*sizes: int) -> bool:
    """Tell whether one of some sizes differs from call to call."""
    return any(isinstance(size, Length) for size in sizes)


def _form_of_slice(view: TensorView, num_rows: int) -> dict[str, tuple[int, ...]]:
    """Return the shape and the strides of a slice of rows; its matrices lie side by side."""
    *several, depth, _ = view.shape
    stride = (*(depth * num_rows for _ in several), *view.stride[-2:])
    return {"shape": (*several, depth, num_rows), "stride": stride}


def _behind(place: int, by: int) -> int:
    """Return the offset ``by`` elements further on, in every call."""
    if isinstance(place, Length):
        return Length(place + by, f"({place.formula}) + {by}")
    return place + by


def cut_weights(graph: TaskGraph, cuts: Mapping[int, Sequence[int]]) -> TaskGraph:
    """Cut weights into slices of rows.

    Args:
        graph: The pass.
        cuts: Weight -> the rows at which its slices begin, ascending, the first 0. Only weights
            that ``divisible_weights`` names.

    Returns:
        A taskgraph in which each cut task is one task a slice, and a join of their columns.
    """
    cuts = {buffer: rows for buffer, rows in cuts.items() if len(rows) > 1}
    if not cuts:
        return graph
    by_task = {d.task: d for d in divisible_weights(graph) if d.buffer in cuts}
    writer = _Rewriter(graph)
    for task in graph.tasks:
        if task.index in by_task:
            writer.cut(task, by_task[task.index], cuts[by_task[task.index].buffer])
        else:
            writer.keep(task)
    return writer.finish()


class _Rewriter:
    """Builds the new taskgraph; buffers and tensors keep their ids, new ones are appended."""

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        self._buffers = list(graph.buffers)
        self._tensors = list(graph.tensors)
        self._tasks: list[Task] = []
        self._experts: list[ExpertMatrices] = []

    def keep(self, task: Task) -> None:
        self._tasks.append(dataclasses.replace(task, index=len(self._tasks)))

    def _tensor(self, view: TensorView, **changes: object) -> int:
        new = dataclasses.replace(view, id=len(self._tensors), **changes)  # type: ignore[arg-type]
        self._tensors.append(new)
        return new.id

    def cut(self, task: Task, weight: Divisible, starts: Sequence[int]) -> None:
        """Replace a task by one task a slice and a join."""
        graph = self._graph
        whole = graph.buffers[weight.buffer]
        at = MATMULS[task.op]
        view = graph.tensors[task.args[at].tensor]
        assert task.results[0] is not None
        out = graph.tensors[task.results[0]]
        ends = [*starts[1:], weight.num_rows]
        if weight.num_matrices > 1:
            matrix_bytes = whole.nbytes // weight.num_matrices
            self._experts.append(ExpertMatrices(whole.name, weight.num_matrices, matrix_bytes))
        # The first slice takes the weight's own id, so that ids stay dense.
        for start, end in zip(starts, ends, strict=True):
            part = Buffer(
                id=weight.buffer if start == 0 else len(self._buffers),
                kind=BufferKind.WEIGHT,
                nbytes=(end - start) * weight.row_bytes,
                name=whole.name,
                offset=whole.offset + start * weight.row_bytes,
            )
            if start == 0:
                self._buffers[weight.buffer] = part
            else:
                self._buffers.append(part)
            rows = self._tensor(view, buffer=part.id, **_form_of_slice(view, end - start))
            columns = self._tensor(out, shape=(out.shape[0], end - start), offset=start)
            args = list(task.args)
            args[at] = Ref(rows)
            if at == 2:  # the bias of addmm, cut like the columns
                args[0] = self._cut_bias(args[0], start, end)
            self._append_slice(task, weight, tuple(args), columns, part, end - start)
        self._tasks.append(
            Task(
                index=len(self._tasks),
                op=JOIN,
                label=task.label,
                reads=(out.buffer,),
                time_ns=0,
            )
        )

    def _cut_bias(self, bias: Ref, start: int, end: int) -> Ref:
        view = self._graph.tensors[bias.tensor]
        step = view.stride[-1]
        return Ref(
            self._tensor(
                view,
                shape=(*view.shape[:-1], end - start),
                offset=_behind(view.offset, start * step),
            )
        )

    def _append_slice(
        self,
        task: Task,
        weight: Divisible,
        args: tuple[object, ...],
        columns: int,
        part: Buffer,
        num_rows: int,
    ) -> None:
        def share(amount: int) -> int:
            return -(-amount * num_rows // weight.num_rows)

        (out,) = task.writes
        self._tasks.append(
            Task(
                index=len(self._tasks),
                op=task.op,
                label=task.label,
                args=args,
                kwargs=task.kwargs,
                results=(columns,),
                reads=tuple(sorted({*task.reads} - {weight.buffer} | {part.id})),
                touches=(out,),
                workspace_bytes=task.workspace_bytes,
                flops=share(task.flops),
                moved_bytes=share(task.moved_bytes),
                time_ns=None if task.time_ns is None else share(task.time_ns),
            )
        )

    def finish(self) -> TaskGraph:
        return dataclasses.replace(
            self._graph,
            buffers=tuple(self._buffers),
            tensors=tuple(self._tensors),
            tasks=tuple(self._tasks),
            experts=(*self._graph.experts, *self._experts),
            calls=(),  # their tasks have other indices now
        )
