"""From scripts to memgraphs."""

from __future__ import annotations

import pytest

from ds_finepage.checker.checker import check
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.memgraph import EdgeKind, NodeKind
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.script import Act, Script, Step, live_bytes, realize
from tests.unit.planning.sketches import edges, names, sketch

# Two weights, each read by one task; the activation in between.
GRAPH = sketch("w0:64 w1:64 a:64", "w0 -> a", "w1 a ->")
W0, W1 = 0, 1


def act(text: str) -> Step:
    """Read ``"reload 0"`` or ``"await_copies"``."""
    what, _, subject = text.partition(" ")
    return Step(Act(what), int(subject) if subject else -1)


def script(*steps: str, entry: tuple[int, ...] = ()) -> Script:
    return Script("test", entry, tuple(act(s) for s in steps))


def nodes_of(found: Script, units: int = 3) -> list[str]:
    memgraph = check(realize(Problem(GRAPH, units * 64, 64), found))
    return names(memgraph)


ONE_BY_ONE = script("reload 0", "compute 0", "drop 0", "reload 1", "compute 1", "drop 1")


def test_activations_get_bytes_when_they_are_made_and_lose_them_behind_their_last_use() -> None:
    assert nodes_of(ONE_BY_ONE) == [
        "alloc w0",
        "reload w0",
        "alloc a",
        "compute 0",
        "drop w0",
        "alloc w1",
        "reload w1",
        "compute 1",
        "drop a",
        "drop w1",
    ]


def test_bytes_that_are_free_are_used_again() -> None:
    memgraph = realize(Problem(GRAPH, 128, 64), ONE_BY_ONE)
    assert memgraph.peak_bytes == 128 == live_bytes(Problem(GRAPH, 0), ONE_BY_ONE)
    assert edges(memgraph, EdgeKind.MEMORY) == ["drop w0 > alloc w1"]


def test_what_is_not_freed_stays_for_good() -> None:
    kept = script("compute 0", "reload 1", "compute 1", "drop 1", entry=(W0,))
    memgraph = check(realize(Problem(GRAPH, 192, 64), kept))
    assert memgraph.entry == memgraph.exit
    assert [r.buffer for r in memgraph.entry] == [W0]
    assert memgraph.reloaded_bytes == 64


def test_a_weight_that_comes_back_for_the_next_pass_comes_to_where_it_was() -> None:
    carried = script(
        "compute 0", "drop 0", "reload 1", "compute 1", "drop 1", "reload 0", entry=(W0,)
    )
    memgraph = check(realize(Problem(GRAPH, 128, 64), carried))
    assert memgraph.entry == memgraph.exit
    assert [r.buffer for r in memgraph.entry] == [W0]
    assert memgraph.reloaded_bytes == 128


def test_only_the_last_reload_is_for_the_next_pass() -> None:
    graph = sketch("w0:64 w1:128 a:64", "w0 -> a", "w1 a ->", "w0 a ->", "w1 a ->")
    twice = script(
        "compute 0",
        "drop 0",
        "reload 1",
        "compute 1",
        "drop 1",
        "reload 0",
        "compute 2",
        "drop 0",
        "reload 1",
        "compute 3",
        "drop 1",
        "reload 0",
        entry=(W0,),
    )
    memgraph = check(realize(Problem(graph, 256, 64), twice))
    assert memgraph.entry == memgraph.exit
    assert memgraph.reloaded_bytes == 64 * 2 + 128 * 2


def test_what_is_computed_can_wait_for_copies() -> None:
    early = ("reload 0", "reload 1", "await_copies", "compute 0", "drop 0", "compute 1", "drop 1")
    memgraph = check(realize(Problem(GRAPH, 192, 64), script(*early)))
    assert edges(memgraph, EdgeKind.SYNC) == ["reload w1 > compute 0"]


def test_what_is_copied_can_wait_for_tasks() -> None:
    late = ("reload 0", "compute 0", "await_tasks", "reload 1", "drop 0", "compute 1", "drop 1")
    memgraph = check(realize(Problem(GRAPH, 192, 64), script(*late)))
    assert edges(memgraph, EdgeKind.SYNC) == ["compute 0 > reload w1"]


def test_an_activation_can_wait_in_host_memory() -> None:
    graph = sketch("w0:64 a0:64 a1:128", "w0 -> a0", "-> a1", "w0 a0 ->")
    out_and_in = script("compute 0", "evict 1", "compute 1", "reload 1", "compute 2", entry=(W0,))
    memgraph = check(realize(Problem(graph, 192, 64), out_and_in))
    assert memgraph.offloaded_bytes == memgraph.reloaded_bytes == 64
    assert [n.kind for n in memgraph.nodes].count(NodeKind.OFFLOAD) == 1


def test_too_much_at_one_time_is_refused_with_task_and_both_numbers() -> None:
    both = script("reload 0", "reload 1", "compute 0", "drop 0", "compute 1", "drop 1")
    with pytest.raises(PlanInfeasibleError) as caught:
        realize(Problem(GRAPH, 128, 64), both)
    message = str(caught.value)
    assert "policy 'test' holds" in message and "task 0 aten.op.default (layer0)" in message
    assert "(192 bytes)" in message and "(128 bytes)" in message
    assert "Raise finepage.device_budget by 64 bytes" in message


def test_a_task_that_never_fits_is_refused_as_anywhere() -> None:
    with pytest.raises(PlanInfeasibleError, match="min_budget_bytes 128"):
        realize(Problem(GRAPH, 64, 64), ONE_BY_ONE)
