"""Holds activations until their copies to host memory are done.

New rows of a KV cache in host memory are copied beside the tasks that follow. A task that used
their bytes again right away would wait for the copy. To hold the bytes takes room from weights, so
the search tries to hold them for long, shortly, and not at all.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ds_finepage.graph.taskgraph import TO_HOST, BufferKind, TaskGraph
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.simulator import Costs
from ds_finepage.planning.time_bound import alone_ns, end_times_ns


@dataclass(frozen=True, slots=True)
class HeldRows:
    """Activations whose bytes stay taken after their last use.

    Attributes:
        ends: Buffer -> the last task of the captured pass during which its bytes are taken.
        freed_with: Activation -> the held buffers whose bytes are freed together with its own.
            Tasks of a cut pass have other numbers, and the order of live ranges is the same. Held
            buffers without such an activation stay until the pass ends.
    """

    ends: Mapping[int, int] = field(default_factory=dict)
    freed_with: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


NOTHING_HELD = HeldRows()


def ways_to_hold(problem: Problem) -> Iterator[HeldRows]:
    """Yield what to hold: rows until their copy is done, or for the time of one copy; nothing."""
    if problem.profile is not None and copies_to_host(problem.graph):
        long, short = _held(problem, math.inf), _held(problem, 1)
        if long.ends:
            yield long
        if short.ends and short != long:
            yield short
    yield NOTHING_HELD


def copies_to_host(graph: TaskGraph) -> bool:
    """Tell whether a task of a pass copies to host memory."""
    return any(task.op == TO_HOST for task in graph.tasks)


def _held(problem: Problem, most_copies: float) -> HeldRows:
    """Hold what is copied to host memory until its copy is done, for the time of some copies."""
    graph, profile = problem.graph, problem.profile
    assert profile is not None
    costs, ends_ns = Costs(profile), end_times_ns(alone_ns(graph, profile), profile)
    wanted: dict[int, int] = {}
    link_ns = 0  # when the link to host memory is free
    for task in graph.tasks:
        if task.op != TO_HOST:
            continue
        copy_ns, ready_ns = costs.task_ns(graph, task), ends_ns[task.index]
        link_ns = max(link_ns, ready_ns) + copy_ns
        done = bisect_left(ends_ns, min(link_ns, ready_ns + most_copies * copy_ns))
        for buffer in task.reads:
            if graph.buffers[buffer].kind is BufferKind.ACTIVATION:
                wanted[buffer] = max(done, wanted.get(buffer, 0))
    late = {b: task for b, task in wanted.items() if task > graph.uses[b][-1]}
    return _freed(graph, late)


def _freed(graph: TaskGraph, wanted: Mapping[int, int]) -> HeldRows:
    """Find the activations with which held ones are freed: the next ones to be used last."""
    last_uses = sorted(
        (found[-1], buffer.id)
        for buffer, found in zip(graph.buffers, graph.uses, strict=True)
        if found and buffer.kind is BufferKind.ACTIVATION and buffer.id not in wanted
    )
    ends: dict[int, int] = {}
    freed_with: dict[int, tuple[int, ...]] = {}
    for buffer, task in wanted.items():
        at = bisect_left(last_uses, (task, 0))
        if at == len(last_uses):
            ends[buffer] = len(graph.tasks) - 1
        else:
            ends[buffer], other = last_uses[at]
            freed_with[other] = (*freed_with.get(other, ()), buffer)
    return HeldRows(ends, freed_with)
