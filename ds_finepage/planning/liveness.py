"""Uses, working sets and the sizes that follow from them.

Everything here is a pure function of the taskgraph.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.taskgraph import BufferKind, Task, TaskGraph
from ds_finepage.units import format_bytes


def aligned(nbytes: int, alignment: int) -> int:
    """Round up to the alignment; an empty buffer still gets one unit, so that it has an address."""
    return max(1, -(-nbytes // alignment)) * alignment


def uses(graph: TaskGraph) -> list[list[int]]:
    """For each buffer, the indices of the tasks that read, write or touch it, ascending."""
    found: list[list[int]] = [[] for _ in graph.buffers]
    for task in graph.tasks:
        for buffer in task.buffers:
            found[buffer].append(task.index)
    return found


def working_set_bytes(graph: TaskGraph, task: Task, alignment: int) -> int:
    """Arena bytes that must be resident together to run one task."""
    return sum(aligned(graph.buffers[b].nbytes, alignment) for b in graph.paged(task))


def min_arena_bytes(graph: TaskGraph, alignment: int) -> int:
    """The smallest arena in which every task can run: the largest working set."""
    return max((working_set_bytes(graph, t, alignment) for t in graph.tasks), default=0)


def ample_arena_bytes(graph: TaskGraph, alignment: int) -> int:
    """An arena in which every paged buffer has bytes of its own, so that nothing ever moves."""
    return sum(aligned(b.nbytes, alignment) for b in graph.buffers if b.kind.is_paged)


def live_activation_bytes(graph: TaskGraph, alignment: int) -> list[int]:
    """For each task, the bytes of all activations that are live while it runs."""
    deltas = [0] * (len(graph.tasks) + 1)
    for buffer, indices in enumerate(uses(graph)):
        if indices and graph.buffers[buffer].kind is BufferKind.ACTIVATION:
            size = aligned(graph.buffers[buffer].nbytes, alignment)
            deltas[indices[0]] += size
            deltas[indices[-1] + 1] -= size
    live, total = [], 0
    for delta in deltas[:-1]:
        total += delta
        live.append(total)
    return live


def needed_arena_bytes(graph: TaskGraph, alignment: int) -> int:
    """All weights plus the largest sum of live activations: what the model needs to run unpaged."""
    weights = sum(
        aligned(b.nbytes, alignment) for b in graph.buffers if b.kind is BufferKind.WEIGHT
    )
    return weights + max(live_activation_bytes(graph, alignment), default=0)


def require_feasible(
    graph: TaskGraph,
    arena_bytes: int,
    alignment: int,
    *,
    non_arena_bytes: int = 0,
    least_bytes: int | None = None,
) -> None:
    """Refuse an arena that cannot hold the working set of some task.

    Args:
        graph: The pass.
        arena_bytes: Size of the arena.
        alignment: Of extents, in bytes.
        non_arena_bytes: Device bytes outside the arena, to express both numbers as a budget.
        least_bytes: The smallest arena, where cutting makes do with less than a working set.

    Raises:
        PlanInfeasibleError: Names the task with the largest working set, and both numbers.
    """
    if not graph.tasks:
        return
    worst = max(graph.tasks, key=lambda t: working_set_bytes(graph, t, alignment))
    need = working_set_bytes(graph, worst, alignment)
    least = need if least_bytes is None else least_bytes
    if least <= arena_bytes:
        return
    cut = "" if least == need else f" ({least} bytes, cut into pieces)"
    raise PlanInfeasibleError(
        f"{worst.where} needs {format_bytes(need)} ({need} bytes) resident together{cut}, and "
        f"{non_arena_bytes} bytes are needed around the arena (inputs, outputs, KV cache, op "
        f"workspaces, results of earlier calls that somebody holds), which makes min_budget_bytes "
        f"{least + non_arena_bytes}; device_budget is {arena_bytes + non_arena_bytes} bytes, "
        f"{max(0, arena_bytes)} of them for the arena. Raise "
        f"finepage.device_budget to >= {least + non_arena_bytes} or lower the batch or the length.",
        least + non_arena_bytes,
    )


def next_use(indices: Sequence[int], position: int, after: int) -> int | None:
    """The first use at or behind task ``after``, searched from ``position`` in the uses."""
    for i in range(position, len(indices)):
        if indices[i] >= after:
            return indices[i]
    return None
