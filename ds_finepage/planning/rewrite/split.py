"""Cuts weights and the tasks that use them: TaskGraph -> TaskGraph.

A weight is the unit of residency. A plan of whole weights can miss the lower bound by the largest
of them, and its ring has to hold two of the largest. A matrix product can be cut along its output
features: each slice of rows of the weight makes its own columns of the result. The values are those
of the whole product, up to the order in which a library sums. A product of rows in groups is cut in
the same way: each slice has the same rows of the matrices of all groups. A product with a packed
weight is cut where the op begins a slice of its own, so its values stay the same bit by bit; its
numbers, scales and minima are one unit, with the same rows in each slice. Packed matrices of
experts are cut in both ways.

Sizes that differ from call to call stay formulas. Only sizes that are the same in every call are
cut, and a slice begins at the same place in every row.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from ds_finepage.graph.packed import (
    CUT_ROWS,
    OUTPUT_ROWS,
    PACKED_GROUPED,
    PACKED_LINEAR,
    PACKED_PRODUCTS,
    SLICED_LINEAR,
)
from ds_finepage.graph.routes import GROUPED_PRODUCTS
from ds_finepage.graph.taskgraph import (
    ITEMSIZE,
    JOIN,
    PACKED_ITEMSIZE,
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
    **dict.fromkeys(sorted(PACKED_PRODUCTS), 1),
    SLICED_LINEAR: 1,
}
"""Ops that can be cut, with the position of the weight among their arguments."""

BIASES = {"aten.addmm.default": 0, PACKED_LINEAR: 4, SLICED_LINEAR: 2}
"""Those of them that may add a bias, with its position."""

_PARTS = {**dict.fromkeys(sorted(PACKED_PRODUCTS), slice(1, 4)), SLICED_LINEAR: slice(1, 2)}
"""Ops that make their columns slice by slice themselves, with the parts of the weight."""


@dataclasses.dataclass(frozen=True, slots=True)
class Divisible:
    """A weight that can be cut into slices of rows.

    Attributes:
        buffer: The weight.
        num_rows: Its rows, the output features.
        row_bytes: Bytes of one row, in all matrices, and beside them.
        task: The one task that uses it.
        num_matrices: The matrices that the weight holds, one an expert.
        beside: The weights that are cut at the same rows, with the bytes of a row of each: the
            scales and minima of packed numbers.
        exact_rows: A cut at a multiple of these rows changes no bit; None if any cut may.
    """

    buffer: int
    num_rows: int
    row_bytes: int
    task: int
    num_matrices: int = 1
    beside: tuple[tuple[int, int], ...] = ()
    exact_rows: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.num_rows * self.row_bytes

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """All weights of the unit, with the bytes of a row of each; ``buffer`` is the first."""
        own_bytes = self.row_bytes - sum(row_bytes for _, row_bytes in self.beside)
        return ((self.buffer, own_bytes), *self.beside)


def quantum(weight: Divisible) -> int:
    """Return the rows that are cut together, so that a slice is a good shape for a kernel."""
    if weight.beside:
        return CUT_ROWS
    return 64 if weight.num_rows >= 1024 else 16 if weight.num_rows >= 128 else 1


def divisible_weights(graph: TaskGraph) -> list[Divisible]:
    """Find the weights that can be cut, in the order of their use."""
    used = graph.uses
    found = (divisible_operand(graph, task) for task in graph.tasks)
    return [
        d
        for d in found
        if d is not None
        and all(
            graph.buffers[b].kind is BufferKind.WEIGHT and used[b] == (d.task,) for b, _ in d.parts
        )
    ]


def divisible_operand(graph: TaskGraph, task: Task) -> Divisible | None:
    """Return the matrix of a product if it can be cut by rows; any task may use or make it."""
    if task.op in _PARTS:
        return _operand_in_slices(graph, task)
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
    made = (*task.writes, *(task.touches if graph.host_tasks else ()))
    if not is_whole or len(made) != 1 or not _has_columns(graph, task, out, rows):
        return None
    return Divisible(buffer.id, rows, num_matrices * depth * itemsize, task.index, num_matrices)


def _operand_in_slices(graph: TaskGraph, task: Task) -> Divisible | None:
    """Return the matrix of a product that is made in slices, or those of experts, if it can be cut.

    Each part must fill its buffer row by row, and the result its own.
    """
    is_grouped = task.op == PACKED_GROUPED
    exact_rows = OUTPUT_ROWS if task.op == SLICED_LINEAR else CUT_ROWS
    (result,) = task.results
    parts = task.args[_PARTS[task.op]]
    if result is None or len(task.writes) != 1 or not all(isinstance(p, Ref) for p in parts):
        return None
    views, out = [graph.tensors[p.tensor] for p in parts], graph.tensors[result]
    *several, num_rows, _ = views[0].shape
    sizes = [graph.buffers[v.buffer].nbytes for v in views]
    is_whole = len(several) == is_grouped and all(
        v.shape[:-1] == (*several, num_rows)
        and v.offset == 0
        and v.stride == (*(num_rows * v.shape[-1] for _ in several), v.shape[-1], 1)
        and size == math.prod(v.shape) * PACKED_ITEMSIZE.get(v.dtype, 0)
        and not varies(*v.shape, size)
        for v, size in zip(views, sizes, strict=True)
    )
    if not is_whole or num_rows <= exact_rows or len({v.buffer for v in views}) < len(views):
        return None
    step, fills = 1, out.offset == 0 and not varies(out.shape[-1])
    for size, stride in zip(reversed(out.shape), reversed(out.stride), strict=True):
        fills = fills and (stride == step or size == 1)
        step *= size
    added = task.args[BIASES[task.op]] if task.op in BIASES else None
    bias = graph.tensors[added.tensor] if isinstance(added, Ref) else None
    if not fills or out.shape[-1] != num_rows or (bias and bias.shape != (num_rows,)):
        return None
    beside = tuple((v.buffer, n // num_rows) for v, n in zip(views[1:], sizes[1:], strict=True))
    row_bytes, num_matrices = sum(sizes) // num_rows, math.prod(several)
    return Divisible(
        views[0].buffer, num_rows, row_bytes, task.index, num_matrices, beside, exact_rows
    )


def packed_units(graph: TaskGraph) -> dict[int, tuple[int, ...]]:
    """Return the scales and minima that belong to packed numbers, by the numbers' buffer."""
    parts = [
        [graph.tensors[a.tensor].buffer for a in task.args[1:4] if isinstance(a, Ref)]
        for task in graph.tasks
        if task.op in PACKED_PRODUCTS
    ]
    return {numbers: tuple(others) for numbers, *others in parts}


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

    The result must fill its buffer, so that the columns are all of it; or it is the first part of a
    result, beside which the host makes the last one.
    """
    width, step = out.stride
    if out.offset != 0 or out.shape[-1] != num_columns or step != 1:
        return False
    if task.writes and width != num_columns:
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


def _form_of_slice(
    task: Task, view: TensorView, num_rows: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and the strides of a slice of rows; its matrices lie side by side."""
    if task.op in _PARTS:
        *several, _, width = view.shape
        stride = (*(num_rows * width for _ in several), *view.stride[-2:])
        return (*several, num_rows, width), stride
    *several, depth, _ = view.shape
    stride = (*(depth * num_rows for _ in several), *view.stride[-2:])
    return (*several, depth, num_rows), stride


def _behind(place: int, by: int) -> int:
    """Return the offset ``by`` elements further on, in every call."""
    if isinstance(place, Length):
        return Length(place + by, f"({place.formula}) + {by}")
    return place + by


def cut_weights(
    graph: TaskGraph, cuts: Mapping[int, Sequence[int]], units: Iterable[Divisible] = ()
) -> TaskGraph:
    """Cut weights into slices of rows.

    Args:
        graph: The pass.
        cuts: Weight -> the rows at which its slices begin, ascending, the first 0. Only weights
            that ``divisible_weights`` names.
        units: What it names, if that is known.

    Returns:
        A taskgraph in which each cut task is one task a slice, and a join of their columns.
    """
    cuts = {buffer: rows for buffer, rows in cuts.items() if len(rows) > 1}
    if not cuts:
        return graph
    by_task = {d.task: d for d in units or divisible_weights(graph) if d.buffer in cuts}
    writer = SliceWriter(graph)
    for task in graph.tasks:
        if task.index in by_task:
            writer.cut(task, by_task[task.index], cuts[by_task[task.index].buffer])
        else:
            writer.keep(task)
    return writer.finish()


def costs_of_part(task: Task, num_rows: int, of_rows: int) -> dict[str, int | None]:
    """Return the costs of the part of a product that some rows of its matrix make, by field.

    Args:
        task: The whole product.
        num_rows: The rows.
        of_rows: All rows of the matrix.
    """

    def share(amount: int) -> int:
        return -(-amount * num_rows // of_rows)

    return {
        "flops": share(task.flops),
        "moved_bytes": share(task.moved_bytes),
        "time_ns": None if task.time_ns is None else share(task.time_ns),
    }


class SliceWriter:
    """Builds the new taskgraph; buffers and tensors keep their ids, new ones are appended."""

    def __init__(self, graph: TaskGraph) -> None:
        """Start without tasks.

        Args:
            graph: The pass to rewrite.
        """
        self.graph = graph
        self._buffers = list(graph.buffers)
        self._tensors = list(graph.tensors)
        self._tasks: list[Task] = []
        self._experts: list[ExpertMatrices] = []

    def keep(self, task: Task, **changes: object) -> None:
        """Append a task, with changes."""
        new = dataclasses.replace(task, index=len(self._tasks), **changes)  # type: ignore[arg-type]
        self._tasks.append(new)

    def tensor(
        self,
        view: TensorView,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int,
        buffer: int | None = None,
    ) -> int:
        """Append a part of a tensor, in the same buffer unless another is named; return its id."""
        part, buffer = len(self._tensors), view.buffer if buffer is None else buffer
        self._tensors.append(TensorView(part, buffer, view.dtype, shape, stride, offset))
        return part

    def slice_of(self, buffer: int, row_bytes: int, start: int, end: int) -> int:
        """Make the buffer of some rows; return its id.

        The first slice takes the id of the whole, so that ids stay dense.

        Args:
            buffer: The whole.
            row_bytes: Bytes of a row of it.
            start: The first row.
            end: Behind the last row.
        """
        whole = self.graph.buffers[buffer]
        is_weight = whole.kind is BufferKind.WEIGHT
        part = dataclasses.replace(
            whole,
            id=len(self._buffers) if start else buffer,
            nbytes=(end - start) * row_bytes,
            offset=whole.offset + start * row_bytes if is_weight else 0,
        )
        if start:
            self._buffers.append(part)
        else:
            self._buffers[buffer] = part
        return part.id

    def cut(self, task: Task, weight: Divisible, starts: Sequence[int]) -> None:
        """Replace a task by one task a slice and a join."""
        num = weight.num_matrices
        for part, _ in weight.parts if num > 1 else ():
            whole = self.graph.buffers[part]
            self._experts.append(ExpertMatrices(whole.name, num, whole.nbytes // num))
        for start, end in pairwise((*starts, weight.num_rows)):
            parts = {b: self.slice_of(b, size, start, end) for b, size in weight.parts}
            self.product(task, weight, parts, start, end)
        if task.writes:  # the parts of a part are joined with the others
            self.join(task)

    def product(
        self, task: Task, weight: Divisible, parts: Mapping[int, int], start: int, end: int
    ) -> None:
        """Append the part of a product that makes some columns of its result.

        Args:
            task: The whole product.
            weight: Its matrix.
            parts: Weights of the unit -> the buffers that hold the rows.
            start: The first row.
            end: Behind the last row.
        """
        assert task.results[0] is not None
        args = list(task.args)
        for at, value in enumerate(args):
            view = self.graph.tensors[value.tensor] if isinstance(value, Ref) else None
            if view is not None and view.buffer in parts:
                shape, stride = _form_of_slice(task, view, end - start)
                part = self.tensor(view, shape, stride, view.offset, parts[view.buffer])
                args[at] = Ref(part)
        out = self.graph.tensors[task.results[0]]
        columns = self.tensor(out, (*out.shape[:-1], end - start), out.stride, start)
        bias = BIASES.get(task.op)
        if bias is not None and isinstance(args[bias], Ref):
            args[bias] = self._cut_bias(args[bias], start, end)

        self.keep(
            task,
            args=tuple(args),
            results=(columns,),
            reads=tuple(sorted({parts.get(b, b) for b in task.reads})),
            writes=(),
            touches=task.writes or task.touches,
            **costs_of_part(task, end - start, weight.num_rows),
        )

    def _cut_bias(self, bias: Ref, start: int, end: int) -> Ref:
        view = self.graph.tensors[bias.tensor]
        offset = _behind(view.offset, start * view.stride[-1])
        return Ref(self.tensor(view, (*view.shape[:-1], end - start), view.stride, offset))

    def join(self, task: Task) -> None:
        """Append the join of the regions that the slices of a task have written."""
        self._tasks.append(
            Task(
                index=len(self._tasks),
                op=JOIN,
                label=task.label,
                reads=task.writes,
                time_ns=0,
            )
        )

    def finish(self) -> TaskGraph:
        """Return the taskgraph."""
        return dataclasses.replace(
            self.graph,
            buffers=tuple(self._buffers),
            tensors=tuple(self._tensors),
            tasks=tuple(self._tasks),
            experts=(*self.graph.experts, *self._experts),
            calls=(),  # their tasks have other indices now
        )
