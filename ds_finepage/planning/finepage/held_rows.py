"""Holds activations until their copies to host memory are done.

New rows of a KV cache in host memory are copied beside the tasks that follow. A task that used
their bytes again right away would wait for the copy. To hold the bytes takes room from weights, so
the search tries to hold them, and not to.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.taskgraph import TO_HOST, BufferKind, TaskGraph
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.simulator import Costs
from ds_finepage.planning.time_bound import end_times_ns

Held = Mapping[int, int]
"""Activation -> the last task of the captured pass during which its bytes stay taken."""


def ways_to_hold(problem: Problem) -> Iterator[Held]:
    """Yield what to hold: rows until their copy is done; nothing."""
    if problem.profile is not None and copies_to_host(problem.graph):
        held = _held(problem, problem.profile)
        if held:
            yield held
    yield {}


def copies_to_host(graph: TaskGraph) -> bool:
    """Tell whether a task of a pass copies to host memory."""
    return any(task.op == TO_HOST for task in graph.tasks)


def _held(problem: Problem, profile: HardwareProfile) -> Held:
    """Hold what is copied to host memory until its copy is done."""
    graph = problem.graph
    costs, ends_ns = Costs(profile), end_times_ns(graph, profile)
    wanted: dict[int, int] = {}
    link_ns = 0  # when the link to host memory is free
    for task in graph.tasks:
        if task.op != TO_HOST:
            continue
        link_ns = max(link_ns, ends_ns[task.index]) + costs.task_ns(graph, task)
        done = bisect_left(ends_ns, link_ns, hi=len(ends_ns) - 1)
        for buffer in task.reads:
            if graph.buffers[buffer].kind is BufferKind.ACTIVATION:
                wanted[buffer] = max(done, wanted.get(buffer, 0))
    return {b: task for b, task in wanted.items() if task > graph.uses[b][-1]}
