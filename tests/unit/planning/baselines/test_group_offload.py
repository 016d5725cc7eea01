"""The policy group-offload: what is copied and freed when.

Against the real hooks: tests/integration/test_other_engines.py.
"""

from __future__ import annotations

import dataclasses

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.memgraph import MemGraph, NodeKind
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.baselines.group_offload import plan_group_offload
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.simulator import simulate
from tests.unit.planning.baselines.layered import CARD, UNIT, awaited, layered, moved


def planned(graph: TaskGraph, units: int = 100) -> MemGraph:
    return check(plan_group_offload(Problem(graph, units * UNIT, UNIT)))


def test_the_next_group_is_copied_while_one_runs() -> None:
    memgraph = planned(layered(1), units=4)
    assert moved(memgraph, NodeKind.RELOAD, NodeKind.DROP) == [
        *("reload embed", "reload layers.0.lin0", "embed", "drop embed"),
        *("reload layers.0.lin1", "layers.0.lin0", "drop layers.0.lin0"),
        *("reload head", "layers.0.lin1", "drop layers.0.lin1"),
        *("head", "drop head"),
    ]
    assert memgraph.entry == memgraph.exit == () and memgraph.offloaded_bytes == 0


def test_copies_hide_behind_tasks_except_the_first() -> None:
    timeline = simulate(planned(layered(3, task_ns=2 * UNIT)), CARD)
    assert timeline.total_ns == timeline.compute_ns + UNIT == 8 * 2 * UNIT + UNIT


def test_tasks_hide_behind_copies_except_the_last() -> None:
    timeline = simulate(planned(layered(3, task_ns=UNIT // 2)), CARD)
    assert timeline.total_ns == timeline.transfer_ns + UNIT // 2 == 8 * UNIT + UNIT // 2


def test_a_copy_waits_until_the_group_before_the_last_is_done() -> None:
    """With a slow first task, no more than one group is copied ahead of it."""
    graph = layered(2)
    tasks = (dataclasses.replace(graph.tasks[0], time_ns=100 * UNIT), *graph.tasks[1:])
    memgraph = planned(dataclasses.replace(graph, tasks=tasks))
    spans = {span.name: span for span in simulate(memgraph, CARD).spans}
    first = spans[graph.tasks[0].where]
    assert spans["reload layers.0.lin0.weight"].end_ns < first.end_ns
    assert spans["reload layers.0.lin1.weight"].start_ns >= first.end_ns
    assert awaited(memgraph) == [
        ("embed", "layers.0.lin1"),
        ("layers.0.lin0", "layers.1.lin0"),
        ("layers.0.lin1", "layers.1.lin1"),
        ("layers.1.lin0", "head"),
    ]


def test_nothing_is_kept_and_a_tied_weight_is_copied_twice() -> None:
    graph = layered(2, is_tied=True)
    assert planned(graph, units=10_000).reloaded_bytes == graph.weight_bytes + UNIT


def test_neighbours_with_one_weight_copy_it_twice() -> None:
    """The first frees it before the second begins."""
    graph = layered(0, is_tied=True)
    assert planned(graph).reloaded_bytes == 2 * UNIT


def test_an_arena_without_room_for_two_groups_is_refused() -> None:
    with pytest.raises(PlanInfeasibleError, match="policy 'group-offload' holds"):
        planned(layered(1), units=3)
