"""Tasks that all ranks of a group run together, and what each moves between them.

``execution/collectives.py`` defines the ops. Their last two arguments are the name of the group and
its number of ranks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection

from ds_finepage.graph.arguments import refs
from ds_finepage.graph.memgraph import Lane, MemGraph, NodeKind, lane_of_late
from ds_finepage.graph.taskgraph import ITEMSIZE, Task, TaskGraph

ALL_REDUCE = "finepage.all_reduce_.default"
ALL_GATHER = "finepage.all_gather_into_.default"
COLLECTIVES = frozenset({ALL_REDUCE, ALL_GATHER})
"""The ops by the names in a task: a sum in place, and the tensors of all ranks in one tensor."""


REDUCE_OPS = frozenset({"sum", "max", "min", "product"})
"""The reductions of ``ALL_REDUCE``, by the names that torch's functional collectives use."""


def is_collective(task: Task) -> bool:
    """Tell whether a task waits for other ranks."""
    return task.op in COLLECTIVES


def traffic_of(graph: TaskGraph, task: Task) -> tuple[int, int]:
    """Return the steps of a collective, and the bytes that a rank sends in all of them.

    Each rank sends to the next one, in a circle: in each step one n-th of the result, n - 1 times
    to gather it, and as often to add it up before that.
    """
    num_ranks = int(task.args[-1])
    result = graph.tensors[next(refs(task.args)).tensor]
    nbytes = math.prod(result.shape) * ITEMSIZE.get(result.dtype, 8)
    steps = (num_ranks - 1) * (2 if task.op == ALL_REDUCE else 1)
    return steps, steps * -(-nbytes // num_ranks)


def order_of(graph: TaskGraph) -> str:
    """Return a digest of the collectives of a pass, in order.

    It leaves out sizes, because ranks may plan the same call for other largest sizes.
    """
    found = [
        (task.op, graph.tensors[next(refs(task.args)).tensor].dtype, *task.args[-2:])
        for task in graph.tasks
        if is_collective(task)
    ]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def collects_of(memgraph: MemGraph, missing: Collection[int]) -> str:
    """Return a digest of the weights whose parts the ranks collect in a pass, in order.

    ``missing`` are buffers of ``memgraph.entry`` that are not in the arena.
    """
    buffers = memgraph.graph.buffers
    found = [
        (buffers[node.buffer].key, node.extent)
        for node in memgraph.nodes
        if node.buffer is not None
        and (
            node.kind is NodeKind.COLLECT
            or (
                node.kind is NodeKind.RESIDENT
                and node.buffer in missing
                and lane_of_late(memgraph, node) is Lane.RANKS
            )
        )
    ]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]
