"""Unpacking: the tasks that make a weight's values from packed numbers, scales and minima.

A quantised model keeps small integers. Before a product it turns them into the numbers that they
stand for: masks, shifts, casts, scales. Such values follow from weights alone, so nothing of them
has to be kept or copied to host memory: they can be made again from the packed weight.
"""

from __future__ import annotations

from ds_finepage.graph.taskgraph import BufferKind, Task, TaskGraph

_POINTWISE = (
    "abs add bitwise_and bitwise_not bitwise_or clamp clone cos div eq erf exp floor_divide ge gelu"
    " gt isinf isnan le leaky_relu log logical_and logical_not logical_or lt masked_fill maximum"
    " minimum mul ne neg pow reciprocal relu remainder rsqrt rsub sigmoid silu sin sqrt sub tanh"
    " where _to_copy"
)
_SHIFTS = "__and__ __lshift__ __or__ __rshift__ bitwise_left_shift bitwise_right_shift bitwise_xor"
POINTWISE_OPS = frozenset(f"aten.{name}" for name in _POINTWISE.split())
"""Ops whose every element follows from those at the same place, without overload."""

SHIFT_OPS = frozenset(f"aten.{name}" for name in _SHIFTS.split())
"""Pointwise ops on packed numbers, without overload."""

GATHERING_OPS = frozenset({"aten.cat", "aten.stack"})
"""Ops that put tensors side by side, along their second argument."""

_ROUNDED = ("uint8", "int8", "int16", "int32", "uint16", "uint32")


def packet_of(task: Task) -> str:
    """Return the name of a task's op without its overload."""
    return task.op.rpartition(".")[0]


def unpacks(task: Task) -> bool:
    """Tell whether a task may be a step of an unpacking: it only makes one new tensor, by rows."""
    known = POINTWISE_OPS | SHIFT_OPS | GATHERING_OPS
    return (
        packet_of(task) in known
        and task.flops == 0
        and len(task.results) == 1
        and len(task.writes) < 2
        and not {*task.writes, *task.touches} & {*task.reads}
    )


def unpacked_buffers(graph: TaskGraph) -> frozenset[int]:
    """Return the activations that follow from packed weights, and from nothing but weights."""
    packed = {
        t.buffer
        for t in graph.tensors
        if t.dtype in _ROUNDED and graph.buffers[t.buffer].kind is BufferKind.WEIGHT
    }
    if not packed:
        return frozenset()
    fixed = (BufferKind.WEIGHT, BufferKind.CONSTANT)
    given = {b.id for b in graph.buffers if b.kind in fixed and b.gather is None}
    changed = [0] * len(graph.buffers)
    for task in graph.tasks:
        for buffer in (*task.writes, *task.touches):
            changed[buffer] += 1
    found: set[int] = set()
    for task in graph.tasks:
        if not unpacks(task) or packed.isdisjoint(task.reads) or not given.issuperset(task.reads):
            continue
        (result,) = task.results
        made = None if result is None else graph.tensors[result].buffer
        if made is not None and graph.buffers[made].kind is BufferKind.ACTIVATION:
            found.add(made)
            if made in task.touches or changed[made] == 1:
                given.add(made)
                packed.add(made)
    return frozenset(found)
