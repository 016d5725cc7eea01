"""Uses, working sets, and the sizes that follow from them: pure functions of the taskgraph."""

from __future__ import annotations

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.taskgraph import BufferKind, Task, TaskGraph
from ds_finepage.units import align_up, format_bytes


def extent_bytes(nbytes: int, alignment: int) -> int:
    """Return the size of a buffer's extent; an empty buffer gets one unit, to have an address."""
    return align_up(max(1, nbytes), alignment)


def working_set_bytes(graph: TaskGraph, task: Task, alignment: int) -> int:
    """Return the arena bytes that must be resident together to run one task."""
    return sum(extent_bytes(graph.buffers[b].nbytes, alignment) for b in graph.paged(task))


def min_arena_bytes(graph: TaskGraph, alignment: int) -> int:
    """Return the smallest arena in which every task can run: the largest working set."""
    return max((working_set_bytes(graph, t, alignment) for t in graph.tasks), default=0)


def ample_arena_bytes(graph: TaskGraph, alignment: int) -> int:
    """Return the arena in which every paged buffer has bytes of its own, so nothing ever moves."""
    return sum(extent_bytes(b.nbytes, alignment) for b in graph.buffers if b.kind.is_paged)


def live_activation_bytes(graph: TaskGraph, alignment: int) -> list[int]:
    """Return, for each task, the bytes of all activations that are live while it runs."""
    deltas = [0] * (len(graph.tasks) + 1)
    for buffer, indices in enumerate(graph.uses):
        if indices and graph.buffers[buffer].kind is BufferKind.ACTIVATION:
            size = extent_bytes(graph.buffers[buffer].nbytes, alignment)
            deltas[indices[0]] += size
            deltas[indices[-1] + 1] -= size
    live, total = [], 0
    for delta in deltas[:-1]:
        total += delta
        live.append(total)
    return live


def needed_arena_bytes(graph: TaskGraph, alignment: int) -> int:
    """Return the arena that runs without paging: all weights and the peak of live activations."""
    weights = sum(
        extent_bytes(b.nbytes, alignment) for b in graph.buffers if b.kind is BufferKind.WEIGHT
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
        least_bytes: The smallest arena, if cut weights need less than a whole working set.

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
        f"{non_arena_bytes} bytes are needed outside the arena (inputs, outputs, KV cache, op "
        f"workspaces, results of earlier calls that are still alive), which makes min_budget_bytes "
        f"{least + non_arena_bytes}; device_budget is {arena_bytes + non_arena_bytes} bytes, "
        f"{max(0, arena_bytes)} of them for the arena. Raise "
        f"finepage.device_budget to >= {least + non_arena_bytes} or lower the batch or the length.",
        least + non_arena_bytes,
    )
