"""Policy lru: demand paging."""

from __future__ import annotations

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.memgraph import MemGraph, NodeKind
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.baselines import lru
from ds_finepage.planning.baselines.lru import plan_lru
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.simulator import simulate
from tests.unit.planning.baselines.layered import CARD, UNIT, layered, moved
from tests.unit.planning.sketches import chain, sketch


def planned(graph: TaskGraph, units: int) -> MemGraph:
    return check(plan_lru(Problem(graph, arena_bytes=units * UNIT, alignment=UNIT)))


@pytest.mark.parametrize("units", range(2, 10))
def test_a_cycle_that_does_not_fit_misses_everything(units: int) -> None:
    memgraph = planned(chain(9), units)
    assert memgraph.reloaded_bytes == 9 * UNIT
    assert memgraph.offloaded_bytes == 0


def test_a_cycle_that_fits_misses_nothing() -> None:
    memgraph = planned(chain(9), 10)
    assert memgraph.reloaded_bytes == 0
    assert memgraph.entry == memgraph.exit


def test_nothing_is_copied_before_it_is_touched() -> None:
    memgraph = planned(layered(1), 4)
    assert moved(memgraph, NodeKind.RELOAD) == [
        *("reload embed", "embed"),
        *("reload layers.0.lin0", "layers.0.lin0"),
        *("reload layers.0.lin1", "layers.0.lin1"),
        *("reload head", "head"),
    ]


def test_copies_and_tasks_take_turns() -> None:
    timeline = simulate(planned(layered(3, task_ns=100), 6), CARD)
    assert timeline.total_ns == timeline.compute_ns + timeline.transfer_ns == 8 * 100 + 8 * UNIT


def test_what_was_used_least_recently_goes_first() -> None:
    graph = sketch("w0:64 w1:64 w2:64 a:64", "w0 -> a", "w1 a ->", "w0 a ->", "w2 a ->", "w0 a ->")
    # Three units hold two weights: w1 goes for w2, as w0 was used since, and w2 goes for w1.
    memgraph = planned(graph, 3)
    reloaded = [n.buffer for n in memgraph.nodes if n.kind is NodeKind.RELOAD]
    assert reloaded == [1, 2]


def test_a_dirty_activation_is_copied_out_and_back() -> None:
    graph = sketch("w0:128 a0:64 a1:64", "-> a0", "-> a1", "w0 a1 ->", "a0 ->")
    memgraph = planned(graph, 3)
    assert memgraph.offloaded_bytes == UNIT
    assert memgraph.reloaded_bytes == 128 + UNIT


def test_a_working_set_that_does_not_fit_is_refused() -> None:
    with pytest.raises(PlanInfeasibleError, match="task 1 .* min_budget_bytes 128"):
        planned(sketch("w0:64 w1:128", "w0 ->", "w1 ->"), 1)


def test_a_pager_that_never_settles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lru, "MAX_PASSES", 1)
    with pytest.raises(PlanInfeasibleError, match="'lru' still changes .* after 1 passes"):
        planned(chain(9), 4)
