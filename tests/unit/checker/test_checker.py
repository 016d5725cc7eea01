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
    ALLOC,
    COMPUTE,
    DROP,
    GOOD,
    LEFT,
    NBYTES,
    OFFLOAD,
    RELOAD,
    RESIDENT,
    RIGHT,
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
    """What is right comes back as it is."""
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
    """The error names the policy, each fault, the nodes and the buffers."""
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
    """Of very many violations only the first are spelled out."""
    bad = replace(paging(), edges=(), alignment=256, arena_bytes=128)
    many = replace(bad, nodes=tuple(replace(n, id=n.id + 1) for n in bad.nodes * 3))
    with pytest.raises(InvalidPlanError, match=r"and \d+ more"):
        check(many)


# --- what is right though it looks odd -------------------------------------------------------


@pytest.mark.parametrize("policy", ["horizon", "published", "published-outputs"])
def test_no_policy_may_offload_bytes_that_nobody_wrote(policy: str) -> None:
    """The name of a policy excuses nothing."""
    garbage = memgraph(
        taskgraph("a", task(0, writes=[0])),
        [
            (ALLOC, 0, LEFT),
            (OFFLOAD, 0, LEFT),
            (ALLOC, 0, LEFT),
            (RELOAD, 0, LEFT),
            (COMPUTE, 0),
            (DROP, 0, LEFT),
        ],
        "0>1 1>2 2>3 1>3 3>4 4>5",
        host_slots=((0, 0),),
        host_bytes=NBYTES,
        policy=policy,
    )
    assert [v.fault for v in violations(garbage)] == [Fault.OFFLOAD_UNDEFINED]


def test_dirty_buffer_may_be_dropped_before_it_is_written_anew() -> None:
    """Contents that nobody reads any more are not lost."""
    good = memgraph(
        taskgraph("a", task(0, writes=[0]), task(1, writes=[0])),
        [
            (ALLOC, 0, LEFT),
            (COMPUTE, 0),
            (DROP, 0, LEFT),
            (ALLOC, 0, RIGHT),
            (COMPUTE, 1),
            (DROP, 0, RIGHT),
        ],
        "0>1 1>2 3>4 4>5",
    )
    assert violations(good) == []


def test_reserved_bytes_may_be_given_up_unwritten() -> None:
    """A drop of bytes that hold nothing loses nothing."""
    good = memgraph(
        taskgraph("a", task(0, writes=[0])),
        [
            (ALLOC, 0, LEFT),
            (DROP, 0, LEFT),
            (ALLOC, 0, LEFT),
            (COMPUTE, 0),
            (DROP, 0, LEFT),
        ],
        "0>1 1>2 2>3 3>4",
    )
    assert violations(good) == []


def test_a_resident_weight_may_come_back() -> None:
    """The host master of a weight exists anyway."""
    good = memgraph(
        taskgraph("w", task(0, reads=[0]), task(1, reads=[0])),
        [
            (RESIDENT, 0, LEFT),
            (COMPUTE, 0),
            (DROP, 0, LEFT),
            (ALLOC, 0, LEFT),
            (RELOAD, 0, LEFT),
            (COMPUTE, 1),
        ],
        "0>1 0>2 1>2 2>3 3>4 4>5",
        entry=(Residency(0, LEFT),),
        exit=(Residency(0, LEFT),),
    )
    assert violations(good) == []


def test_all_vacators_of_a_range_count() -> None:
    """Who takes the bytes of two must wait for both."""
    good = memgraph(
        taskgraph("aaa", task(0, writes=[0, 1]), task(1, writes=[2])),
        [
            (ALLOC, 0, LEFT),
            (ALLOC, 1, RIGHT),
            (COMPUTE, 0),
            (DROP, 0, LEFT),
            (DROP, 1, RIGHT),
            (ALLOC, 2, Extent(64, 128)),
            (COMPUTE, 1),
            (DROP, 2, Extent(64, 128)),
        ],
        "0>2 1>2 2>3 2>4 3>5 4>5 5>6 6>7",
    )
    assert violations(good) == []
    for missing in ("3>5", "4>5"):
        found = violations(edges(good, remove=missing))
        assert [v.fault for v in found] == [Fault.NO_MEMORY_EDGE]


def test_only_the_latest_vacator_of_a_byte_counts() -> None:
    """The one before it is finished by then."""
    good = memgraph(
        taskgraph("aaa", task(0, writes=[0]), task(1, writes=[1]), task(2, writes=[2])),
        [node for b in range(3) for node in ((ALLOC, b, LEFT), (COMPUTE, b), (DROP, b, LEFT))],
        "0>1 1>2 2>3 3>4 4>5 5>6 6>7 7>8",
    )
    assert violations(good) == []


def test_empty_buffer_needs_no_bytes() -> None:
    """A buffer of no bytes may lie anywhere, even inside another."""
    good = of_buffer(changes(), 3, nbytes=0)
    good = node(node(good, 1, extent=Extent(64, 0)), 3, extent=Extent(64, 0))
    assert violations(good) == []
