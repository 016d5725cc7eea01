"""The order in which modules are entered and left, for systems that hook modules with weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.baselines.modules import module_calls

ENTER, TASK, LEAVE = "enter", "task", "leave"


@dataclass(frozen=True, slots=True)
class Visits:
    """The calls of all modules that have weights of their own.

    Attributes:
        weights: For each call, the weights that are attributes of the module itself. A tied weight
            is one of each module that has it.
        events: ENTER and LEAVE, each with the position of a call among ``weights``, and TASK with
            that of a task; in order.
    """

    weights: tuple[tuple[int, ...], ...]
    events: tuple[tuple[str, int], ...]


def module_visits(graph: TaskGraph) -> Visits:
    """List the calls of modules with weights, and all tasks, in order.

    A tied weight has the name of one module. Another module has it too if that module's own tasks
    read it, and no module around that one has it.
    """
    is_weight = [b.kind is BufferKind.WEIGHT for b in graph.buffers]
    owned: dict[str, list[int]] = {}
    for buffer in graph.buffers:
        if is_weight[buffer.id]:
            owned.setdefault(buffer.name.rpartition(".")[0], []).append(buffer.id)
    weights: list[tuple[int, ...]] = []
    events: list[tuple[str, int]] = []
    around: list[tuple[int, int, tuple[int, ...]]] = []  # depth, end, weights of each open call
    indices: list[int] = []  # of each open call; -1 without weights
    done = 0

    def run_tasks(end: int) -> Iterator[tuple[str, int]]:
        nonlocal done
        yield from ((TASK, i) for i in range(done, end))
        done = max(done, end)

    def leave(depth: int) -> None:
        while around and around[-1][0] >= depth:
            _, end, _ = around.pop()
            events.extend(run_tasks(end))
            if (index := indices.pop()) >= 0:
                events.append((LEAVE, index))

    for call in module_calls(graph):
        leave(call.depth)
        events.extend(run_tasks(call.begin))
        own = dict.fromkeys(owned.get(call.name, ()))
        others = {b for _, _, found in around for b in found}
        for task in graph.tasks[call.begin : call.end]:
            if task.label == call.name:
                own |= dict.fromkeys(b for b in task.reads if is_weight[b] and b not in others)
        around.append((call.depth, call.end, tuple(own)))
        indices.append(len(weights) if own else -1)
        if own:
            events.append((ENTER, len(weights)))
            weights.append(tuple(own))
    leave(0)
    events.extend(run_tasks(len(graph.tasks)))
    return Visits(tuple(weights), tuple(events))
