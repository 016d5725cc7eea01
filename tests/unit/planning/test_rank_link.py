"""The time of a collective: worked out on paper for ranks in a circle."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_finepage.graph.collectives import ALL_GATHER, ALL_REDUCE
from ds_finepage.planning.simulator import task_time_ns
from tests.unit.graph.test_collectives import graph_of
from tests.unit.planning.test_simulator import PLAIN

LINKED = replace(PLAIN, rank_bytes_per_s=5e8, rank_latency_ns=10)


@pytest.mark.parametrize(("op", "expected"), [(ALL_REDUCE, 6 * 10 + 384), (ALL_GATHER, 30 + 192)])
def test_steps_and_bytes_take_time(op: str, expected: int) -> None:
    """Of 128 bytes on four ranks each step sends 32, at two nanoseconds a byte."""
    graph = graph_of(op)
    assert task_time_ns(graph, graph.tasks[0], LINKED) == expected


def test_a_link_that_is_not_known_takes_the_time_of_the_traffic_in_memory() -> None:
    graph = graph_of(ALL_REDUCE)
    task = replace(graph.tasks[0], moved_bytes=7000)
    assert task_time_ns(graph, task, PLAIN) == 7
    assert task_time_ns(graph, task, replace(PLAIN, launch_ns=9)) == 9
    assert task_time_ns(graph, task, replace(PLAIN, rank_latency_ns=10)) == 60
