"""The predicted time of a pass alone is that of its timeline."""

from __future__ import annotations

import dataclasses

import pytest

from ds_finepage.graph.memgraph import MemGraph, NodeKind
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.simulator import predicted_ns, simulate
from tests.unit.planning.sketches import chain, plan
from tests.unit.planning.test_simulator import PLAIN, Sketch


@pytest.mark.parametrize("policy", ("finepage", "horizon", "lru"))
def test_it_is_the_end_of_the_timeline(policy: str) -> None:
    graph = chain(8)
    graph = dataclasses.replace(
        graph, tasks=tuple(dataclasses.replace(task, time_ns=50) for task in graph.tasks)
    )
    for units in (3, 5, 12):
        found = plan(graph, arena_bytes=units * 64, alignment=64, policy=policy)
        timeline = simulate(found, PLAIN)
        assert predicted_ns(found, PLAIN) == timeline.total_ns
        assert timeline.total_ns > 0


def test_a_pass_without_nodes_takes_no_time() -> None:
    empty = MemGraph(TaskGraph("", (), (), ()), "hand", 0, 1, (), (), (), ())
    assert predicted_ns(empty, PLAIN) == 0


def test_it_lasts_until_the_last_copy_is_done() -> None:
    made = Sketch(weights=[], activations=(50,), flops=[10])
    alloc = made.place(NodeKind.ALLOC, 0, 0)
    first = made.compute(0, alloc)
    made.place(NodeKind.OFFLOAD, 0, 0, first)
    assert predicted_ns(made.memgraph(), PLAIN) == 60
