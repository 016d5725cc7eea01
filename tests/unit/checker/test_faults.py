"""The checker finds each way to be wrong, and calls it by its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from ds_finepage.checker.checker import violations
from ds_finepage.checker.faults import Fault
from ds_finepage.graph.memgraph import Extent, MemGraph, Node, Residency
from ds_finepage.graph.taskgraph import JOIN
from tests.unit.checker.by_hand import (
    ALLOC,
    COMPUTE,
    DROP,
    LEFT,
    NBYTES,
    OFFLOAD,
    RELOAD,
    RESIDENT,
    RIGHT,
    changes,
    collecting,
    edges,
    gathering,
    host_copies,
    insert,
    memgraph,
    node,
    of_buffer,
    of_task,
    paging,
    task,
    taskgraph,
    touches,
    without,
)


class Case(NamedTuple):
    """One mutation and what it must be called."""

    fault: Fault
    base: Callable[[], MemGraph]
    mutate: Callable[[MemGraph], MemGraph]
    also: frozenset[Fault] = frozenset()  # what follows from it


F = Fault
PINNED: dict[str, Any] = {"host_slots": ((0, 128), (2, 0)), "host_bytes": 256}


def _of_one_rank(m: MemGraph) -> MemGraph:
    return replace(m, graph=replace(m.graph, num_ranks=1))


CASES = [
    # Shape.
    Case(F.TASKGRAPH, paging, lambda m: of_task(m, 1, index=7)),
    Case(F.TASKGRAPH, paging, lambda m: of_task(m, 1, reads=(3, 1))),
    Case(F.TASKGRAPH, paging, lambda m: of_task(m, 1, reads=(1, 3, 99))),
    Case(F.TASKGRAPH, paging, lambda m: of_buffer(m, 1, id=0)),
    Case(F.TASKGRAPH, paging, lambda m: of_buffer(m, 1, nbytes=-1)),
    Case(F.WEIGHT_WRITTEN, paging, lambda m: of_task(m, 0, writes=(0, 2))),
    Case(F.WEIGHT_WRITTEN, paging, lambda m: of_task(m, 0, touches=(0,))),
    Case(F.ALIGNMENT, paging, lambda m: replace(m, alignment=0)),
    Case(F.NODE_ID, paging, lambda m: node(m, 3, id=5)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 2, task=None)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 2, task=99)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 2, buffer=0)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 2, extent=LEFT)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 3, task=0)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 3, buffer=None)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 3, buffer=99)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 3, extent=None)),
    Case(F.EDGE_RANGE, paging, lambda m: edges(m, add="11>99")),
    Case(F.EDGE_BACKWARD, paging, lambda m: edges(m, add="4>2")),
    Case(F.EDGE_BACKWARD, paging, lambda m: edges(m, add="4>4")),
    Case(F.EDGE_UNSORTED, paging, lambda m: replace(m, edges=m.edges[1:] + m.edges[:1])),
    Case(F.EDGE_REPEATED, paging, lambda m: replace(m, edges=m.edges[:1] + m.edges)),
    # Tasks.
    Case(F.TASK_MISSING, changes, lambda m: without(m, 7), frozenset({F.CONTENTS_LOST})),
    Case(F.TASK_REPEATED, changes, lambda m: insert(m, Node(8, COMPUTE, task=4), "5>8 6>8 8>9")),
    # Places.
    Case(F.NOT_PAGED, paging, lambda m: insert(m, Node(13, ALLOC, 3, extent=RIGHT), "12>13")),
    Case(F.NOT_PAGED, paging, lambda m: insert(m, Node(13, DROP, 3, extent=RIGHT), "")),
    Case(F.EXTENT_OUTSIDE, touches, lambda m: replace(m, arena_bytes=127), frozenset({F.NOT_LIVE})),
    Case(
        F.EXTENT_OUTSIDE,
        changes,
        lambda m: node(m, 3, extent=Extent(-128, 128)),
        frozenset({F.NOT_RELEASED}),
    ),
    Case(F.EXTENT_UNALIGNED, paging, lambda m: replace(m, alignment=256)),
    Case(F.EXTENT_TOO_SMALL, paging, lambda m: of_buffer(m, 1, nbytes=129)),
    Case(F.EXTENT_CHANGED, paging, lambda m: node(m, 6, extent=RIGHT)),
    Case(F.EXTENT_CHANGED, paging, lambda m: node(m, 4, extent=LEFT)),
    Case(
        F.EXTENT_CHANGED,
        paging,
        lambda m: node(m, 12, extent=Extent(128, 64)),
        frozenset({F.EXTENT_TOO_SMALL}),
    ),
    Case(F.OVERLAP, changes, lambda m: node(node(m, 1, extent=LEFT), 3, extent=LEFT)),
    Case(
        F.OVERLAP,
        changes,
        lambda m: node(node(m, 1, extent=Extent(64, 128)), 3, extent=Extent(64, 128)),
    ),
    Case(
        F.OVERLAP,
        paging,
        lambda m: replace(
            insert(m, Node(1, RESIDENT, 1, extent=Extent(64, 128)), "12>13"),
            entry=(Residency(0, LEFT), Residency(1, Extent(64, 128))),
        ),
        frozenset({F.ALREADY_LIVE, F.RELOAD_OVERWRITES, F.EXTENT_CHANGED, F.EXIT_MISMATCH}),
    ),
    Case(F.ALREADY_LIVE, changes, lambda m: insert(m, Node(4, ALLOC, 0, extent=RIGHT), "3>4")),
    Case(
        F.ALREADY_LIVE,
        paging,
        lambda m: replace(
            insert(m, Node(1, RESIDENT, 0, extent=RIGHT), ""),
            entry=(Residency(0, LEFT), Residency(0, RIGHT)),
        ),
    ),
    Case(F.NOT_LIVE, changes, lambda m: without(m, 1)),
    Case(F.NOT_LIVE, changes, lambda m: insert(m, Node(9, DROP, 0, extent=LEFT), "8>9")),
    Case(F.NOT_LIVE, paging, lambda m: insert(m, Node(13, RELOAD, 2, extent=RIGHT), "4>13 12>13")),
    Case(F.NOT_RELEASED, paging, lambda m: without(m, 12)),
    Case(F.ENTRY_MISMATCH, paging, lambda m: replace(m, entry=())),
    Case(F.ENTRY_MISMATCH, paging, lambda m: replace(m, entry=(Residency(0, RIGHT),))),
    Case(F.ENTRY_MISMATCH, paging, lambda m: replace(m, entry=(*m.entry, Residency(99, LEFT)))),
    Case(
        F.ENTRY_MISMATCH,
        changes,
        lambda m: replace(node(m, 0, kind=RESIDENT), entry=(Residency(0, LEFT),)),
    ),
    Case(F.GATHER_KEPT, paging, lambda m: gathering(m, 0)),
    Case(F.EXIT_MISMATCH, paging, lambda m: replace(m, exit=())),
    Case(F.EXIT_MISMATCH, paging, lambda m: replace(m, exit=m.exit * 2)),
    Case(F.EXIT_MISMATCH, paging, lambda m: replace(m, exit=(Residency(1, RIGHT),))),
    Case(  # bytes without contents are of no use to the next pass
        F.EXIT_MISMATCH,
        paging,
        lambda m: replace(
            insert(m, Node(13, ALLOC, 0, extent=RIGHT), "12>13"),
            exit=(Residency(0, RIGHT), Residency(1, LEFT)),
        ),
    ),
    # Contents.
    Case(F.UNDEFINED_READ, paging, lambda m: edges(without(m, 9), add="8>9 8>11")),
    Case(F.UNDEFINED_READ, changes, lambda m: of_task(m, 0, reads=(3,))),
    Case(  # tasks 0 and 3 change places
        F.STALE_CONTENTS,
        changes,
        lambda m: edges(node(node(m, 2, task=3), 6, task=0), add="1>6 6>8"),
        frozenset({F.NO_READ_DROP_EDGE, F.NOT_LIVE}),
    ),
    Case(  # the caller gets what task 1 wrote, not task 2
        F.STALE_CONTENTS,
        lambda: memgraph(
            taskgraph("s", task(0, writes=[0]), task(1, writes=[0])), "compute0 compute1", "0>1"
        ),
        lambda m: node(node(m, 0, task=1), 1, task=0),
    ),
    Case(  # a touch before the contents that it changes a part of
        F.STALE_CONTENTS,
        lambda: memgraph(
            taskgraph("s", task(0, writes=[0]), task(1, touches=[0]), task(2, reads=[0], op=JOIN)),
            "compute0 compute1 compute2",
            "0>1 0>2 1>2",
        ),
        lambda m: node(node(m, 0, task=1), 1, task=0),
    ),
    Case(F.UNJOINED_READ, touches, lambda m: edges(of_task(m, 3, op="x"), add="5>7 5>8 5>9 6>9")),
    Case(
        F.CONTENTS_LOST,
        paging,
        lambda m: node(m, 4, kind=DROP),
        frozenset({F.NO_HOST_COPY, F.UNDEFINED_READ}),
    ),
    Case(
        F.CONTENTS_LOST,
        touches,
        lambda m: node(m, 3, kind=DROP),
        frozenset({F.NO_HOST_COPY, F.STALE_CONTENTS}),
    ),
    Case(  # the host copy is older than the last change
        F.CONTENTS_LOST,
        host_copies,
        lambda m: node(m, 10, kind=DROP),
        frozenset({F.NO_HOST_COPY, F.STALE_CONTENTS, F.NO_STORE_RELOAD_EDGE}),
    ),
    Case(F.NO_HOST_COPY, changes, lambda m: insert(m, Node(2, RELOAD, 0, extent=LEFT), "0>2 2>3")),
    Case(
        F.RELOAD_OVERWRITES,
        paging,
        lambda m: insert(m, Node(7, RELOAD, 1, extent=LEFT), "5>7 6>7 7>8"),
    ),
    Case(
        F.RELOAD_OVERWRITES,
        paging,
        lambda m: insert(m, Node(2, RELOAD, 0, extent=LEFT), "0>2 2>3 2>4"),
    ),
    Case(
        F.OFFLOAD_UNDEFINED,
        touches,
        lambda m: insert(
            insert(m, Node(10, ALLOC, 0, extent=LEFT), "9>10"),
            Node(11, OFFLOAD, 0, extent=LEFT),
            "3>11 5>11 10>11",
        ),
    ),
    Case(F.WEIGHT_OFFLOADED, paging, lambda m: replace(node(m, 3, kind=OFFLOAD), **PINNED)),
    Case(F.ROUTE_WRONG, paging, lambda m: replace(m, routed=(1,))),
    # The host.
    Case(F.FILE_WRONG, paging, lambda m: replace(m, filed=(99,))),
    Case(F.FILE_WRONG, paging, lambda m: replace(m, filed=(3,))),  # an input
    Case(F.FILE_WRONG, paging, lambda m: replace(m, filed=(1, 0))),
    Case(F.FILE_WRONG, paging, lambda m: replace(m, filed=(1, 1))),
    Case(F.HOST_SLOT_MISSING, paging, lambda m: replace(m, host_slots=())),
    Case(F.HOST_SLOT_MISSING, paging, lambda m: replace(m, host_slots=((2, 0), (99, 0)))),
    Case(
        F.HOST_SLOT_MISSING,
        paging,
        lambda m: replace(m, host_slots=((2, 0), (2, 128)), host_bytes=256),
    ),
    Case(F.HOST_SLOT_OUTSIDE, paging, lambda m: replace(m, host_bytes=NBYTES - 1)),
    Case(F.HOST_SLOT_OUTSIDE, paging, lambda m: replace(m, host_slots=((2, -1),))),
    Case(
        F.HOST_SLOT_OVERLAP,
        paging,
        lambda m: replace(m, host_slots=((0, NBYTES - 1), (2, 0)), host_bytes=256),
    ),
    Case(F.HOST_RACE, host_copies, lambda m: edges(m, remove="4>10")),
    Case(  # the second copy does not build on the first, and may come before it
        F.HOST_RACE,
        lambda: memgraph(
            taskgraph("a", task(0, writes=[0]), task(1, writes=[0])),
            "alloc0L compute0 offload0L alloc0R compute1 offload0R",
            "0>1 1>2 2>3 2>5 3>4 4>5",
            host_slots=((0, 0),),
            host_bytes=NBYTES,
        ),
        lambda m: edges(m, remove="2>5"),
    ),
    # Waits.
    Case(F.NO_DATA_EDGE, paging, lambda m: edges(m, remove="0>2")),  # from a RESIDENT
    Case(F.NO_DATA_EDGE, paging, lambda m: edges(m, remove="6>7")),  # from a RELOAD
    Case(F.NO_DATA_EDGE, paging, lambda m: edges(m, remove="7>10")),  # from a task, KV cache
    Case(F.NO_DATA_EDGE, paging, lambda m: edges(m, remove="10>11")),  # from a task
    Case(F.NO_DATA_EDGE, touches, lambda m: edges(m, remove="5>6")),  # to a touch
    Case(F.NO_DATA_EDGE, touches, lambda m: edges(m, remove="7>8")),  # from a join
    Case(F.NO_ALLOC_EDGE, paging, lambda m: edges(m, remove="1>2")),
    Case(F.NO_ALLOC_EDGE, paging, lambda m: edges(m, remove="5>6")),
    Case(F.NO_ALLOC_EDGE, touches, lambda m: edges(m, remove="0>2")),
    Case(F.NO_MEMORY_EDGE, paging, lambda m: edges(m, remove="3>5")),
    Case(F.NO_MEMORY_EDGE, paging, lambda m: edges(m, remove="4>8")),
    Case(F.NO_READ_DROP_EDGE, paging, lambda m: edges(m, remove="0>3")),
    Case(F.NO_READ_DROP_EDGE, paging, lambda m: edges(m, remove="11>12")),
    Case(F.NO_READ_DROP_EDGE, changes, lambda m: edges(m, remove="2>3")),  # a dead result
    Case(F.NO_USE_OFFLOAD_EDGE, paging, lambda m: edges(m, remove="2>4")),
    Case(F.NO_USE_OFFLOAD_EDGE, touches, lambda m: edges(m, remove="1>3")),
    Case(F.NO_STORE_RELOAD_EDGE, paging, lambda m: edges(m, remove="4>9")),
    Case(F.NO_JOIN_EDGE, touches, lambda m: edges(m, remove="6>7")),
    Case(F.NO_DATA_EDGE, collecting, lambda m: edges(m, remove="1>2")),
    Case(F.NO_DATA_EDGE, collecting, lambda m: edges(m, remove="2>3")),
    Case(
        F.UNDEFINED_READ,
        collecting,
        lambda m: without(m, 2),
        frozenset({F.EXIT_MISMATCH, F.NO_DATA_EDGE}),
    ),
    Case(F.COLLECT_WRONG, collecting, _of_one_rank, frozenset({F.NO_DATA_EDGE})),
    Case(F.NO_ORDER_EDGE, changes, lambda m: edges(m, remove="4>5")),
    Case(F.NO_ORDER_EDGE, changes, lambda m: edges(m, remove="5>6")),
]


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{i}-{case.fault.value}" for i, case in enumerate(CASES)]
)
def test_fault_is_found(case: Case) -> None:
    good = case.base()
    assert violations(good) == []
    found = {v.fault for v in violations(case.mutate(good))}
    assert case.fault in found
    assert found == {case.fault} | case.also


def test_table_covers_every_fault() -> None:
    assert {case.fault for case in CASES} == set(Fault)
