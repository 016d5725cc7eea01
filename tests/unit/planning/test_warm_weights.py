"""Measured ops take less time on weights that were just reloaded; times are worked out on paper."""

from __future__ import annotations

import dataclasses

from ds_finepage.graph.memgraph import MemGraph, NodeKind
from ds_finepage.graph.taskgraph import Task
from ds_finepage.planning.simulator import simulate
from ds_finepage.planning.time_bound import alone_ns
from tests.unit.planning.test_simulator import PLAIN, Sketch, times


def twice_timed(memgraph: MemGraph, *tasks: Task) -> MemGraph:
    return dataclasses.replace(memgraph, graph=dataclasses.replace(memgraph.graph, tasks=tasks))


def test_an_op_is_faster_on_a_weight_that_was_just_reloaded() -> None:
    sketch = Sketch(weights=[10, 30], flops=[0] * 5)
    alloc = sketch.place(NodeKind.ALLOC, 0, 0)
    reload = sketch.place(NodeKind.RELOAD, 0, 0, alloc)
    sketch.place(NodeKind.RESIDENT, 1, 10)
    computes = [sketch.compute(task, reload) for task in range(5)]
    reads = [(0,), (0,), (1,), (), (0, 1)]
    tasks = [
        Task(i, "op", reads=read, time_ns=100, warm_ns=None if i == 3 else 60)
        for i, read in enumerate(reads)
    ]
    found = times(simulate(twice_timed(sketch.memgraph(), *tasks), PLAIN))
    assert [found[c][1] - found[c][0] for c in computes] == [60, 100, 100, 100, 100]
    first = dataclasses.replace(tasks[0], reads=(0, 1))  # a quarter of its bytes
    found = times(simulate(twice_timed(sketch.memgraph(), first, *tasks[1:]), PLAIN))
    assert found[computes[0]][1] - found[computes[0]][0] == 90
    plan = twice_timed(sketch.memgraph(), *tasks)
    assert alone_ns(plan.graph, PLAIN) == [60, 60, 60, 100, 60]
    assert alone_ns(plan.graph, PLAIN, knows_warm=False) == [100] * 5
    found = times(simulate(plan, PLAIN, knows_warm=False))
    assert [found[c][1] - found[c][0] for c in computes] == [100] * 5


def test_weights_that_a_first_pass_brings_in_are_just_reloaded() -> None:
    sketch = Sketch(weights=[10], flops=[0])
    resident = sketch.place(NodeKind.RESIDENT, 0, 0)
    compute = sketch.compute(0, resident)
    plan = twice_timed(sketch.memgraph(), Task(0, "op", reads=(0,), time_ns=100, warm_ns=60))
    assert times(simulate(plan, PLAIN))[compute] == (0, 100)
    assert times(simulate(plan, PLAIN, entry_missing=[0]))[compute] == (10, 70)
