"""The checker: right memgraphs pass, and errors name what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from ds_finepage.checker.checker import check, violations
from ds_finepage.checker.faults import Fault
from ds_finepage.errors import InvalidPlanError
from ds_finepage.graph.memgraph import EdgeKind, Extent, MemGraph, Residency
from tests.unit.checker.by_hand import (
    GOOD,
    LEFT,
    NBYTES,
    changes,
    edges,
    memgraph,
    node,
    of_buffer,
    paging,
    task,
    taskgraph,
)


@pytest.mark.parametrize("base", GOOD)
def test_good_memgraphs_pass(base: Callable[[], MemGraph]) -> None:
    good = base()
    assert check(good) is good


@pytest.mark.parametrize("base", GOOD)
def test_every_edge_is_needed(base: Callable[[], MemGraph]) -> None:
    """The memgraphs above hold no edge too many, and the checker misses none of them."""
    good = base()
    for edge in good.edges:
        fewer = replace(good, edges=tuple(e for e in good.edges if e != edge))
        assert violations(fewer), f"{edge.before}>{edge.after} is not missed"


@pytest.mark.parametrize("base", GOOD)
@pytest.mark.parametrize("kind", EdgeKind)
def test_kind_of_edge_does_not_matter(base: Callable[[], MemGraph], kind: EdgeKind) -> None:
    """The kind only says why an edge is there."""
    good = base()
    assert violations(replace(good, edges=tuple(replace(e, kind=kind) for e in good.edges))) == []


def test_error_lists_what_is_wrong() -> None:
    bad = replace(edges(paging(), remove="11>12"), exit=())
    with pytest.raises(InvalidPlanError) as caught:
        check(bad)
    message = str(caught.value)
    assert "'by hand'" in message
    assert "2 rule(s)" in message
    assert "no_read_drop_edge: node 12 (drop activation 2) does not wait for" in message
    assert "node 11 (task 3 x)" in message
    assert "exit_mismatch: exit does not list weight 1 at [0, 128)" in message


def test_error_does_not_grow_without_end() -> None:
    bad = replace(paging(), edges=(), alignment=256, arena_bytes=128)
    many = replace(bad, nodes=tuple(replace(n, id=n.id + 1) for n in bad.nodes * 3))
    with pytest.raises(InvalidPlanError, match=r"and \d+ more"):
        check(many)


@pytest.mark.parametrize("policy", ["horizon", "published", "published-outputs"])
def test_no_policy_may_offload_bytes_that_nobody_wrote(policy: str) -> None:
    """The name of a policy excuses nothing."""
    garbage = memgraph(
        taskgraph("a", task(0, writes=[0])),
        "alloc0L offload0L alloc0L reload0L compute0 drop0L",
        "0>1 1>2 2>3 1>3 3>4 4>5",
        host_slots=((0, 0),),
        host_bytes=NBYTES,
        policy=policy,
    )
    assert [v.fault for v in violations(garbage)] == [Fault.OFFLOAD_UNDEFINED]


RIGHT_THOUGH_ODD = {
    "a dirty buffer may be dropped before it is written anew": memgraph(
        taskgraph("a", task(0, writes=[0]), task(1, writes=[0])),
        "alloc0L compute0 drop0L alloc0R compute1 drop0R",
        "0>1 1>2 3>4 4>5",
    ),
    "reserved bytes may be given up unwritten": memgraph(
        taskgraph("a", task(0, writes=[0])),
        "alloc0L drop0L alloc0L compute0 drop0L",
        "0>1 1>2 2>3 3>4",
    ),
    "a resident weight may come back": memgraph(
        taskgraph("w", task(0, reads=[0]), task(1, reads=[0])),
        "resident0L compute0 drop0L alloc0L reload0L compute1",
        "0>1 0>2 1>2 2>3 3>4 4>5",
        entry=(Residency(0, LEFT),),
        exit=(Residency(0, LEFT),),
    ),
    "only the latest vacator of a byte counts": memgraph(
        taskgraph("aaa", task(0, writes=[0]), task(1, writes=[1]), task(2, writes=[2])),
        "alloc0L compute0 drop0L alloc1L compute1 drop1L alloc2L compute2 drop2L",
        "0>1 1>2 2>3 3>4 4>5 5>6 6>7 7>8",
    ),
}


@pytest.mark.parametrize("why", RIGHT_THOUGH_ODD)
def test_what_is_right_though_it_looks_odd_passes(why: str) -> None:
    assert violations(RIGHT_THOUGH_ODD[why]) == []


def test_all_vacators_of_a_range_count() -> None:
    good = memgraph(
        taskgraph("aaa", task(0, writes=[0, 1]), task(1, writes=[2])),
        "alloc0L alloc1R compute0 drop0L drop1R alloc2M compute1 drop2M",
        "0>2 1>2 2>3 2>4 3>5 4>5 5>6 6>7",
    )
    assert violations(good) == []
    for missing in ("3>5", "4>5"):
        found = violations(edges(good, remove=missing))
        assert [v.fault for v in found] == [Fault.NO_MEMORY_EDGE]


def test_empty_buffer_needs_no_bytes() -> None:
    good = of_buffer(changes(), 3, nbytes=0)
    good = node(node(good, 1, extent=Extent(64, 0)), 3, extent=Extent(64, 0))
    assert violations(good) == []
