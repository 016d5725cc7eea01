"""Unpacks a weight a slice of rows at a time: TaskGraph -> TaskGraph.

A layer with a packed weight makes the whole weight before its product: masks and shifts, a cast, a
scale, a minimum. Each of these tasks makes a whole copy, which may take four times the bytes of the
packed weight and more. They work element by element, so they can be cut into rows, and no bit
changes: for one slice after another, all tasks of the unpacking run. Only the last of them writes
to the whole unpacked weight; the slices of the others are free again.

Where products may be cut, each slice goes into its part of the product instead, so no more than a
slice is ever unpacked. A library may sum parts in another order, so the last bits may change.

The packed numbers, scales and minima are cut likewise. So each slice of them can be kept, or come
when it is used.
"""

from __future__ import annotations

import dataclasses
import heapq
from itertools import pairwise

from ds_finepage.graph.arguments import refs
from ds_finepage.graph.taskgraph import ITEMSIZE, BufferKind, Ref, Task, TaskGraph, TensorView
from ds_finepage.graph.unpacking import GATHERING_OPS, packet_of, unpacked_buffers, unpacks
from ds_finepage.planning.rewrite.split import (
    Divisible,
    SliceWriter,
    costs_of_part,
    divisible_operand,
    quantum,
    varies,
)

NUM_SLICES = 8
"""Slices of an unpacking. More of them need less room, and each of their tasks has to start."""

LEAST_SLICE_BYTES = 256
"""Smaller slices of a weight are not worth extents and copies of their own; it stays whole."""

_ITEMSIZE = {**ITEMSIZE, "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "bool": 1}

Dims = dict[int, tuple[int, int]]
"""Tensor -> the dimension that the rows lie along, and its entries for each row."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Unpacking:
    """Tasks that make one unpacked weight.

    Attributes:
        target: The unpacked weight.
        num_rows: Its rows.
        tasks: The tasks, in order; the last one makes ``target``.
        dims: By task, for each tensor that has the rows: where they lie.
        parts: The buffers that are cut into slices, with the bytes of a row of each.
        product: The matrix of the one product that uses the target, if that is cut too.
    """

    target: int
    num_rows: int
    tasks: tuple[int, ...]
    dims: dict[int, Dims]
    parts: dict[int, int]
    product: Divisible | None

    @property
    def place(self) -> int:
        """The task at which all slices are made, one after another."""
        return self.tasks[-1] if self.product is None else self.product.task

    @property
    def starts(self) -> list[int]:
        """The first row of each slice, and the number of rows."""
        return [*range(0, self.num_rows, _rows_a_slice(self.num_rows)), self.num_rows]


def _rows_a_slice(num_rows: int) -> int:
    """Return the rows of a slice, a good shape for a kernel."""
    unit = quantum(Divisible(buffer=0, num_rows=num_rows, row_bytes=0, task=0))
    return -(-num_rows // (NUM_SLICES * unit)) * unit


def unpack_by_rows(graph: TaskGraph, *, cuts_products: bool) -> TaskGraph:
    """Cut the unpacking of weights into slices of rows.

    Args:
        graph: The pass.
        cuts_products: Cut the products with unpacked weights at the same rows.

    Returns:
        The taskgraph; ``graph`` itself if it unpacks nothing, or is cut already. The weights of
        several ranks are not cut.
    """
    if graph.parted:  # a slice of rows would lie on one rank
        return graph
    finder = _Finder(graph)
    unpackings = (finder.find(b, cuts_products=cuts_products) for b in finder.makers)
    found = {u.place: u for u in unpackings if u is not None}
    if not found:
        return graph
    moved = {t for u in found.values() for t in u.tasks}
    writer = SliceWriter(graph)
    for task in graph.tasks:
        if task.index in found:
            _cut(writer, found[task.index], task)
        elif task.index not in moved:
            writer.keep(task)
    return writer.finish()


def _cut(writer: SliceWriter, unpacking: _Unpacking, last: Task) -> None:
    """Append an unpacking slice by slice, with the product if it is cut too."""
    graph = writer.graph
    for start, end in pairwise(unpacking.starts):
        parts = {b: writer.slice_of(b, size, start, end) for b, size in unpacking.parts.items()}
        for index in unpacking.tasks:
            _append_slice(writer, unpacking, graph.tasks[index], parts, start, end)
        if unpacking.product is not None:
            writer.product(last, unpacking.product, parts, start, end)
    writer.join(last)


def _append_slice(
    writer: SliceWriter,
    unpacking: _Unpacking,
    task: Task,
    parts: dict[int, int],
    start: int,
    end: int,
) -> None:
    """Append rows ``start`` to ``end`` of one task; ``parts`` has the buffers of this slice."""
    dims = unpacking.dims[task.index]

    def rows_of(tensor: int) -> int:
        view = writer.graph.tensors[tensor]
        if tensor not in dims:
            return tensor
        at, entries = dims[tensor]
        shape = (*view.shape[:at], (end - start) * entries, *view.shape[at + 1 :])
        if view.buffer in parts:
            return writer.tensor(view, shape, view.stride, view.offset, parts[view.buffer])
        offset = view.offset + start * entries * view.stride[at]
        return writer.tensor(view, shape, view.stride, offset)

    def sliced(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(map(sliced, value))
        return Ref(rows_of(value.tensor)) if isinstance(value, Ref) else value

    (made,), (result,) = task.writes, task.results
    assert result is not None
    # All tasks of a slice name the whole unpacked weight, so that none is in the way of another's.
    # It would have to go to host memory and come back, and it is larger than what it is made from.
    is_whole, target = made not in parts, unpacking.target
    writer.keep(
        task,
        args=sliced(task.args),
        results=(rows_of(result),),
        reads=tuple(sorted({parts.get(b, b) for b in task.reads})),
        writes=() if is_whole else (parts[made],),
        touches=() if target in parts else (target,),
        workspace_bytes=-(-task.workspace_bytes * (end - start) // unpacking.num_rows),
        **costs_of_part(task, end - start, unpacking.num_rows),
    )


class _Finder:
    """Finds the tasks that make an unpacked weight.

    Attributes:
        makers: Buffers that follow from packed weights alone -> the one task that makes each.
    """

    def __init__(self, graph: TaskGraph) -> None:
        """Look for the makers in a pass."""
        self._graph = graph
        unpacked = unpacked_buffers(graph)
        makers: dict[int, list[Task]] = {}
        for task in graph.tasks if unpacked else ():
            for buffer in unpacked.intersection((*task.writes, *task.touches)):
                makers.setdefault(buffer, []).append(task)
        alone = {b: tasks[0] for b, tasks in makers.items() if len(tasks) == 1}
        self.makers = {b: task for b, task in alone.items() if task.writes and unpacks(task)}
        self._steps = {task.index for task in self.makers.values()}

    def find(self, target: int, *, cuts_products: bool) -> _Unpacking | None:
        """Return the unpacking that makes a buffer; None if it is only a step, or cannot be cut."""
        graph, maker = self._graph, self.makers[target]
        users = [graph.tasks[t] for t in graph.uses[target] if t != maker.index]
        if all(task.index in self._steps for task in users) or any(t.touches for t in users):
            return None
        operand = divisible_operand(graph, users[0]) if len(users) == 1 else None
        if operand is not None and operand.buffer != target:
            operand = None
        num_rows = self._num_rows(maker) if operand is None else operand.num_rows
        if operand is not None and (not cuts_products or operand.num_matrices > 1):
            operand = None
        if num_rows < 2 or self._dims(maker, num_rows) is None:
            return None
        dims = self._walk(target, num_rows)
        parts = self._parts(dims, num_rows)
        if operand is None:
            del parts[target]
        return _Unpacking(target, num_rows, tuple(sorted(dims)), dims, parts, operand)

    def _num_rows(self, maker: Task) -> int:
        """Return the size of the outermost dimension of a result."""
        assert maker.results[0] is not None
        view = self._graph.tensors[maker.results[0]]
        return max(zip(view.stride, view.shape, strict=True), default=(0, 0))[1]

    def _walk(self, target: int, num_rows: int) -> dict[int, Dims]:
        """Return the tasks that make some rows of a target, with the places of the rows.

        The last task comes first. So when a task is looked at, all that may use its result are
        known. A result that others use as well is left whole.
        """
        found: dict[int, Dims] = {}
        waiting = [(-self.makers[target].index, target)]
        while waiting:
            index, buffer = heapq.heappop(waiting)
            task = self.makers[buffer]
            dims = self._dims(task, num_rows)
            users = [t for t in self._graph.uses[buffer] if t != task.index]
            if -index in found or dims is None:
                continue
            if buffer != target and not all(self._fills(buffer, t, found, num_rows) for t in users):
                continue
            found[task.index] = dims
            for read in task.reads:
                if read in self.makers:
                    heapq.heappush(waiting, (-self.makers[read].index, read))
        return found

    def _parts(self, dims: dict[int, Dims], num_rows: int) -> dict[int, int]:
        """Return the buffers that are cut, with the bytes of a row of each.

        These are the results of the tasks, and the weights that no other task uses.
        """
        graph, parts = self._graph, {}
        for buffer in {b for index in dims for b in graph.tasks[index].buffers}:
            whole = graph.buffers[buffer]
            is_made = buffer in self.makers and self.makers[buffer].index in dims
            is_own = (
                whole.kind is BufferKind.WEIGHT
                and whole.gather is None
                and whole.nbytes * _rows_a_slice(num_rows) >= LEAST_SLICE_BYTES * num_rows
                and all(self._fills(buffer, t, dims, num_rows) for t in graph.uses[buffer])
            )
            if is_made or is_own:
                parts[buffer] = whole.nbytes // num_rows
        return dict(sorted(parts.items()))

    def _dims(self, task: Task, num_rows: int) -> Dims | None:
        """Find where the rows lie in a task's tensors; None if the task cannot be cut by rows."""
        graph = self._graph
        (result,) = task.results
        if result is None or any(True for _, value in task.kwargs for _ in refs(value)):
            return None
        out = graph.tensors[result]
        at = self._rows_at(out, num_rows)
        if at is None:
            return None
        behind, is_in = len(out.shape) - at, out.shape[at]
        if packet_of(task) in GATHERING_OPS:
            along = task.args[1] if len(task.args) > 1 else 0
            along %= len(out.shape)
            if along == at:
                return None
            is_stack = packet_of(task) == "aten.stack"
            behind -= is_stack and along > at
        dims = {result: (at, is_in // num_rows)}
        for ref in refs(task.args):
            view = graph.tensors[ref.tensor]
            place = len(view.shape) - behind
            if varies(*view.shape, *view.stride, view.offset):
                return None
            if place < 0 or view.shape[place] == 1:
                continue  # the same for all rows
            if view.shape[place] != is_in:
                return None
            dims[view.id] = (place, is_in // num_rows)
        return dims

    def _rows_at(self, view: TensorView, num_rows: int) -> int | None:
        """Return the dimension of a tensor that lies along whole rows of its buffer, or None."""
        nbytes, itemsize = self._graph.buffers[view.buffer].nbytes, _ITEMSIZE.get(view.dtype, 0)
        if not itemsize or varies(*view.shape, *view.stride, view.offset, nbytes):
            return None
        for at, (size, stride) in enumerate(zip(view.shape, view.stride, strict=True)):
            reach = view.offset + sum(
                (n - 1) * step
                for i, (n, step) in enumerate(zip(view.shape, view.stride, strict=True))
                if i != at
            )
            is_outer = size * stride * itemsize == nbytes and reach < stride
            if is_outer and size >= num_rows and not size % num_rows:
                return at
        return None

    def _fills(self, buffer: int, index: int, found: dict[int, Dims], num_rows: int) -> bool:
        """Tell whether a task is in ``found``, and all that it reads of a buffer has whole rows."""
        if index not in found:
            return False
        views = (self._graph.tensors[r.tensor] for r in refs(self._graph.tasks[index].args))
        return all(
            v.id in found[index] and self._rows_at(v, num_rows) == found[index][v.id][0]
            for v in views
            if v.buffer == buffer
        )
