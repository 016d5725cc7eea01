"""The checker: right memgraphs pass, and each way to be wrong is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from ds_finepage.checker.checker import check, violations
from ds_finepage.checker.faults import Fault
from ds_finepage.errors import InvalidPlanError
from ds_finepage.graph.memgraph import (
    Edge,
    EdgeKind,
    Extent,
    MemGraph,
    Node,
    NodeKind,
    Residency,
)
from ds_finepage.graph.taskgraph import JOIN, Buffer, BufferKind, Task, TaskGraph

LEFT, RIGHT = Extent(0, 128), Extent(128, 128)  # the two places of every arena here
NBYTES = 100


# --- memgraphs made by hand ------------------------------------------------------------------


def taskgraph(kinds: str, *tasks: Task) -> TaskGraph:
    """Build a taskgraph; one letter a buffer: w(eight), s(tate), a(ctivation), o(utput)."""
    named = {kind.value[0]: kind for kind in BufferKind}
    buffers = [Buffer(i, named[letter], NBYTES) for i, letter in enumerate(kinds)]
    return TaskGraph("by hand", tuple(buffers), (), tasks)


def task(index: int, reads: Any = (), writes: Any = (), touches: Any = (), op: str = "x") -> Task:
    """Build a task."""
    return Task(index, op, reads=tuple(reads), writes=tuple(writes), touches=tuple(touches))


def memgraph(
    graph: TaskGraph,
    nodes: Iterable[tuple[NodeKind, int] | tuple[NodeKind, int, Extent]],
    edges: str,
    **others: Any,
) -> MemGraph:
    """Build a memgraph; ``edges`` is "before>after ..."."""
    made = []
    for i, (kind, which, *extent) in enumerate(nodes):
        place = extent[0] if extent else None
        if kind is NodeKind.COMPUTE:
            made.append(Node(i, kind, task=which))
        else:
            made.append(Node(i, kind, buffer=which, extent=place))
    usual: dict[str, Any] = {
        "policy": "by hand",
        "arena_bytes": 256,
        "alignment": 64,
        "entry": (),
        "exit": (),
    }
    pairs = (pair.split(">") for pair in edges.split())
    return MemGraph(
        graph=graph,
        nodes=tuple(made),
        edges=tuple(sorted(Edge(int(b), int(a), EdgeKind.DATA) for b, a in pairs)),
        **(usual | others),
    )


RESIDENT, STORED, ALLOC = NodeKind.RESIDENT, NodeKind.STORED, NodeKind.ALLOC
RELOAD, COMPUTE = NodeKind.RELOAD, NodeKind.COMPUTE
OFFLOAD, DROP = NodeKind.OFFLOAD, NodeKind.DROP


def gathering(m: MemGraph, buffer: int) -> MemGraph:
    """Let a weight hold rows that each call chooses."""
    buffers = list(m.graph.buffers)
    buffers[buffer] = replace(buffers[buffer], gather=0)
    return replace(m, graph=replace(m.graph, buffers=tuple(buffers)))


def paging() -> MemGraph:
    """Two weights and an activation take turns in an arena for two."""
    return memgraph(
        taskgraph(
            "wwaso",
            task(0, reads=[0], writes=[2]),
            task(1, reads=[1, 3], writes=[3]),
            task(2, reads=[2, 3], writes=[2]),
            task(3, reads=[2], writes=[4]),
        ),
        [
            (RESIDENT, 0, LEFT),
            (STORED, 1),
            (ALLOC, 2, RIGHT),
            (COMPUTE, 0),
            (DROP, 0, LEFT),
            (OFFLOAD, 2, RIGHT),
            (ALLOC, 1, LEFT),
            (RELOAD, 1, LEFT),
            (COMPUTE, 1),
            (ALLOC, 2, RIGHT),
            (RELOAD, 2, RIGHT),
            (COMPUTE, 2),
            (COMPUTE, 3),
            (DROP, 2, RIGHT),
        ],
        "0>3 2>3 0>4 3>4 3>5 4>6 6>7 1>7 7>8 5>9 9>10 5>10 8>11 10>11 11>12 11>13 12>13",
        entry=(Residency(0, LEFT),),
        exit=(Residency(1, LEFT),),
        host_slots=((2, 0),),
        host_bytes=128,
    )


def touches() -> MemGraph:
    """Two tasks each write a region; one of the two is followed by an eviction."""
    return memgraph(
        taskgraph(
            "ao",
            task(0, touches=[0]),
            task(1, touches=[0]),
            task(2, touches=[0]),
            task(3, reads=[0], op=JOIN),
            task(4, reads=[0], writes=[1]),
        ),
        [
            (ALLOC, 0, LEFT),
            (COMPUTE, 0),
            (COMPUTE, 1),
            (OFFLOAD, 0, LEFT),
            (ALLOC, 0, LEFT),
            (RELOAD, 0, LEFT),
            (COMPUTE, 2),
            (COMPUTE, 3),
            (COMPUTE, 4),
            (DROP, 0, LEFT),
        ],
        "0>1 0>2 1>3 2>3 3>4 4>5 3>5 5>6 6>7 7>8 7>9 8>9",
        host_slots=((0, 0),),
        host_bytes=NBYTES,
    )


def changes() -> MemGraph:
    """An activation and a KV cache are read, changed in place, written anew; one result is dead."""
    return memgraph(
        taskgraph(
            "asoa",
            task(0, writes=[0, 3]),
            task(1, reads=[0, 1], writes=[2]),
            task(2, reads=[0, 1], writes=[0, 1]),
            task(3, writes=[0]),
            task(4, reads=[0, 1]),
        ),
        [
            (ALLOC, 0, LEFT),
            (ALLOC, 3, RIGHT),
            (COMPUTE, 0),
            (DROP, 3, RIGHT),
            (COMPUTE, 1),
            (COMPUTE, 2),
            (COMPUTE, 3),
            (COMPUTE, 4),
            (DROP, 0, LEFT),
        ],
        "0>2 1>2 2>3 2>4 2>5 4>5 5>6 5>7 6>7 4>8 5>8 6>8 7>8",
    )


def host_copies() -> MemGraph:
    """An activation is offloaded, used clean and dropped, used and changed, offloaded again."""
    return memgraph(
        taskgraph(
            "aoo",
            task(0, writes=[0]),
            task(1, reads=[0], writes=[1]),
            task(2, reads=[0], writes=[0]),
            task(3, reads=[0], writes=[2]),
        ),
        [
            (ALLOC, 0, LEFT),
            (COMPUTE, 0),
            (OFFLOAD, 0, LEFT),
            (ALLOC, 0, LEFT),
            (RELOAD, 0, LEFT),
            (COMPUTE, 1),
            (DROP, 0, LEFT),
            (ALLOC, 0, RIGHT),
            (RELOAD, 0, RIGHT),
            (COMPUTE, 2),
            (OFFLOAD, 0, RIGHT),
            (ALLOC, 0, RIGHT),
            (RELOAD, 0, RIGHT),
            (COMPUTE, 3),
            (DROP, 0, RIGHT),
        ],
        # 6>10 alone keeps the second offload from overwriting what the first reload reads.
        "0>1 1>2 2>3 3>4 2>4 4>5 4>6 5>6 6>10 7>8 2>8 8>9 9>10 10>11 11>12 10>12 12>13 12>14 13>14",
        host_slots=((0, 0),),
        host_bytes=NBYTES,
    )


GOOD = (paging, touches, changes, host_copies)


# --- mutations -------------------------------------------------------------------------------


def node(m: MemGraph, which: int, **to: Any) -> MemGraph:
    """Change a node."""
    nodes = list(m.nodes)
    nodes[which] = replace(nodes[which], **to)
    return replace(m, nodes=tuple(nodes))


def edges(m: MemGraph, add: str = "", remove: str = "") -> MemGraph:
    """Add and remove edges."""
    pairs = {(e.before, e.after) for e in m.edges}
    pairs |= {(int(b), int(a)) for b, a in (p.split(">") for p in add.split())}
    pairs -= {(int(b), int(a)) for b, a in (p.split(">") for p in remove.split())}
    return replace(m, edges=tuple(Edge(b, a, EdgeKind.DATA) for b, a in sorted(pairs)))


def without(m: MemGraph, which: int) -> MemGraph:
    """Remove a node and its edges; the ones behind it move up."""
    return replace(
        m,
        nodes=tuple(replace(n, id=n.id - (n.id > which)) for n in m.nodes if n.id != which),
        edges=tuple(
            Edge(e.before - (e.before > which), e.after - (e.after > which), e.kind)
            for e in m.edges
            if which not in (e.before, e.after)
        ),
    )


def insert(m: MemGraph, new: Node, add: str) -> MemGraph:
    """Insert a node at its id and add edges, in new ids."""
    at = new.id
    moved = [replace(n, id=n.id + (n.id >= at)) for n in m.nodes]
    return edges(
        replace(
            m,
            nodes=(*moved[:at], new, *moved[at:]),
            edges=tuple(
                Edge(e.before + (e.before >= at), e.after + (e.after >= at), e.kind)
                for e in m.edges
            ),
        ),
        add=add,
    )


def of_task(m: MemGraph, which: int, **to: Any) -> MemGraph:
    """Change a task."""
    tasks = list(m.graph.tasks)
    tasks[which] = replace(tasks[which], **to)
    return replace(m, graph=replace(m.graph, tasks=tuple(tasks)))


def of_buffer(m: MemGraph, which: int, **to: Any) -> MemGraph:
    """Change a buffer."""
    buffers = list(m.graph.buffers)
    buffers[which] = replace(buffers[which], **to)
    return replace(m, graph=replace(m.graph, buffers=tuple(buffers)))


class Case(NamedTuple):
    """One mutation and what it must be called."""

    fault: Fault
    base: Callable[[], MemGraph]
    mutate: Callable[[MemGraph], MemGraph]
    also: frozenset[Fault] = frozenset()  # what follows from it


F = Fault
PINNED: dict[str, Any] = {"host_slots": ((0, 128), (2, 0)), "host_bytes": 256}

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
    Case(F.NODE_ID, paging, lambda m: node(m, 4, id=5)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 3, task=None)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 3, task=99)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 3, buffer=0)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 3, extent=LEFT)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 4, task=0)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 4, buffer=None)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 4, buffer=99)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 4, extent=None)),
    Case(F.NODE_FIELDS, paging, lambda m: node(m, 1, extent=LEFT)),
    Case(F.EDGE_RANGE, paging, lambda m: edges(m, add="12>99")),
    Case(F.EDGE_BACKWARD, paging, lambda m: edges(m, add="5>3")),
    Case(F.EDGE_BACKWARD, paging, lambda m: edges(m, add="5>5")),
    Case(F.EDGE_UNSORTED, paging, lambda m: replace(m, edges=m.edges[1:] + m.edges[:1])),
    Case(F.EDGE_REPEATED, paging, lambda m: replace(m, edges=m.edges[:1] + m.edges)),
    # Tasks.
    Case(F.TASK_MISSING, changes, lambda m: without(m, 7), frozenset({F.CONTENTS_LOST})),
    Case(
        F.TASK_REPEATED,
        changes,
        lambda m: insert(m, Node(8, COMPUTE, task=4), "5>8 6>8 8>9"),
    ),
    # Places.
    Case(F.NOT_PAGED, paging, lambda m: insert(m, Node(14, ALLOC, 3, extent=RIGHT), "13>14")),
    Case(F.NOT_PAGED, paging, lambda m: insert(m, Node(14, DROP, 3, extent=RIGHT), "")),
    Case(
        F.EXTENT_OUTSIDE,
        touches,
        lambda m: replace(m, arena_bytes=127),
        frozenset({F.NOT_LIVE}),
    ),
    Case(
        F.EXTENT_OUTSIDE,
        changes,
        lambda m: node(m, 3, extent=Extent(-128, 128)),
        frozenset({F.NOT_RELEASED}),
    ),
    Case(F.EXTENT_UNALIGNED, paging, lambda m: replace(m, alignment=256)),
    Case(F.EXTENT_TOO_SMALL, paging, lambda m: of_buffer(m, 1, nbytes=129)),
    Case(F.EXTENT_CHANGED, paging, lambda m: node(m, 7, extent=RIGHT)),
    Case(F.EXTENT_CHANGED, paging, lambda m: node(m, 5, extent=LEFT)),
    Case(
        F.EXTENT_CHANGED,
        paging,
        lambda m: node(m, 13, extent=Extent(128, 64)),
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
            insert(m, Node(1, RESIDENT, 1, extent=Extent(64, 128)), "13>14"),
            entry=(Residency(0, LEFT), Residency(1, Extent(64, 128))),
        ),
        frozenset({F.ALREADY_LIVE, F.RELOAD_OVERWRITES, F.EXTENT_CHANGED, F.EXIT_MISMATCH}),
    ),
    Case(
        F.ALREADY_LIVE,
        changes,
        lambda m: insert(m, Node(4, ALLOC, 0, extent=RIGHT), "3>4"),
    ),
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
    Case(F.NOT_LIVE, paging, lambda m: insert(m, Node(14, RELOAD, 2, extent=RIGHT), "5>14 13>14")),
    Case(F.NOT_RELEASED, paging, lambda m: without(m, 13)),
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
            insert(m, Node(14, ALLOC, 0, extent=RIGHT), "13>14"),
            exit=(Residency(0, RIGHT), Residency(1, LEFT)),
        ),
    ),
    # Contents.
    Case(F.UNDEFINED_READ, paging, lambda m: edges(without(m, 10), add="9>10 9>12")),
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
            taskgraph("s", task(0, writes=[0]), task(1, writes=[0])),
            [(COMPUTE, 0), (COMPUTE, 1)],
            "0>1",
        ),
        lambda m: node(node(m, 0, task=1), 1, task=0),
    ),
    Case(  # a touch before the contents that it changes a part of
        F.STALE_CONTENTS,
        lambda: memgraph(
            taskgraph("s", task(0, writes=[0]), task(1, touches=[0]), task(2, reads=[0], op=JOIN)),
            [(COMPUTE, 0), (COMPUTE, 1), (COMPUTE, 2)],
            "0>1 0>2 1>2",
        ),
        lambda m: node(node(m, 0, task=1), 1, task=0),
    ),
    Case(
        F.UNJOINED_READ,
        touches,
        lambda m: edges(of_task(m, 3, op="x"), add="5>7 5>8 5>9 6>9"),
    ),
    Case(
        F.CONTENTS_LOST,
        paging,
        lambda m: node(m, 5, kind=DROP),
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
    Case(
        F.NO_HOST_COPY,
        changes,
        lambda m: insert(m, Node(2, RELOAD, 0, extent=LEFT), "0>2 2>3"),
    ),
    Case(
        F.RELOAD_OVERWRITES,
        paging,
        lambda m: insert(m, Node(8, RELOAD, 1, extent=LEFT), "1>8 6>8 7>8 8>9"),
    ),
    Case(
        F.RELOAD_OVERWRITES,
        paging,
        lambda m: insert(m, Node(3, RELOAD, 0, extent=LEFT), "0>3 3>4 3>5"),
    ),
    Case(
        F.OFFLOAD_UNDEFINED,
        touches,
        lambda m: insert(
            insert(m, Node(10, ALLOC, 0, extent=LEFT), "9>10"),
            Node(11, OFFLOAD, 0, extent=LEFT),
            "3>11 10>11",
        ),
    ),
    Case(F.WEIGHT_OFFLOADED, paging, lambda m: replace(node(m, 4, kind=OFFLOAD), **PINNED)),
    Case(F.ROUTE_WRONG, paging, lambda m: replace(m, routed=(1,))),
    Case(F.STORED_WRONG, paging, lambda m: without(m, 1)),
    Case(F.STORED_WRONG, paging, lambda m: insert(m, Node(0, STORED, 2), "")),
    Case(F.STORED_WRONG, paging, lambda m: insert(m, Node(0, STORED, 1), "")),
    # The host.
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
    Case(F.HOST_RACE, host_copies, lambda m: edges(m, remove="6>10")),
    Case(  # the second copy does not build on the first, and may come before it
        F.HOST_RACE,
        lambda: memgraph(
            taskgraph("a", task(0, writes=[0]), task(1, writes=[0])),
            [
                (ALLOC, 0, LEFT),
                (COMPUTE, 0),
                (OFFLOAD, 0, LEFT),
                (ALLOC, 0, RIGHT),
                (COMPUTE, 1),
                (OFFLOAD, 0, RIGHT),
            ],
            "0>1 1>2 2>3 3>4 4>5",
            host_slots=((0, 0),),
            host_bytes=NBYTES,
        ),
        lambda m: edges(m, remove="2>3"),
    ),
    # Waits.
    Case(F.NO_DATA_EDGE, paging, lambda m: edges(m, remove="0>3")),  # from a RESIDENT
    Case(F.NO_DATA_EDGE, paging, lambda m: edges(m, remove="7>8")),  # from a RELOAD
    Case(F.NO_DATA_EDGE, paging, lambda m: edges(m, remove="8>11")),  # from a task, KV cache
    Case(F.NO_DATA_EDGE, paging, lambda m: edges(m, remove="11>12")),  # from a task
    Case(F.NO_DATA_EDGE, touches, lambda m: edges(m, remove="5>6")),  # to a touch
    Case(F.NO_DATA_EDGE, touches, lambda m: edges(m, remove="7>8")),  # from a join
    Case(F.NO_ALLOC_EDGE, paging, lambda m: edges(m, remove="2>3")),
    Case(F.NO_ALLOC_EDGE, paging, lambda m: edges(m, remove="6>7")),
    Case(F.NO_ALLOC_EDGE, touches, lambda m: edges(m, remove="0>2")),
    Case(F.NO_MEMORY_EDGE, paging, lambda m: edges(m, remove="4>6")),
    Case(F.NO_MEMORY_EDGE, paging, lambda m: edges(m, remove="5>9")),
    Case(F.NO_READ_DROP_EDGE, paging, lambda m: edges(m, remove="0>4")),
    Case(F.NO_READ_DROP_EDGE, paging, lambda m: edges(m, remove="12>13")),
    Case(F.NO_READ_DROP_EDGE, changes, lambda m: edges(m, remove="2>3")),  # a dead result
    Case(F.NO_USE_OFFLOAD_EDGE, paging, lambda m: edges(m, remove="3>5")),
    Case(F.NO_USE_OFFLOAD_EDGE, touches, lambda m: edges(m, remove="1>3")),
    Case(F.NO_STORE_RELOAD_EDGE, paging, lambda m: edges(m, remove="1>7")),
    Case(F.NO_STORE_RELOAD_EDGE, paging, lambda m: edges(m, remove="5>10")),
    Case(F.NO_JOIN_EDGE, touches, lambda m: edges(m, remove="6>7")),
    Case(F.NO_ORDER_EDGE, changes, lambda m: edges(m, remove="4>5")),
    Case(F.NO_ORDER_EDGE, changes, lambda m: edges(m, remove="5>6")),
]


@pytest.mark.parametrize(
    "case", CASES, ids=[f"{i}-{case.fault.value}" for i, case in enumerate(CASES)]
)
def test_fault_is_found(case: Case) -> None:
    """Each mutation is called what it is, and nothing else that it is not."""
    good = case.base()
    assert violations(good) == []
    found = {v.fault for v in violations(case.mutate(good))}
    assert case.fault in found
    assert found == {case.fault} | case.also


def test_table_covers_every_fault() -> None:
    """No fault goes untested."""
    assert {case.fault for case in CASES} == set(Fault)


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
    bad = replace(edges(paging(), remove="12>13"), exit=())
    with pytest.raises(InvalidPlanError) as caught:
        check(bad)
    message = str(caught.value)
    assert "'by hand'" in message
    assert "2 rule(s)" in message
    assert "no_read_drop_edge: node 13 (drop activation 2) does not wait for" in message
    assert "node 12 (task 3 x)" in message
    assert "exit_mismatch: exit does not list weight 1 at [0, 128)" in message


def test_error_does_not_grow_without_end() -> None:
    """Of very many violations only the first are spelled out."""
    bad = replace(paging(), edges=(), alignment=256, arena_bytes=128)
    many = replace(bad, nodes=tuple(replace(n, id=n.id + 1) for n in bad.nodes * 3))
    with pytest.raises(InvalidPlanError, match=r"and \d+ more"):
        check(many)


# --- what is right though it looks odd -------------------------------------------------------


def test_published_system_may_offload_weights_and_garbage() -> None:
    """Only a policy that reproduces its faults may copy a weight, or bytes nobody wrote."""
    weight = replace(node(paging(), 4, kind=OFFLOAD), policy="published", **PINNED)
    assert violations(weight) == []
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
        policy="published-outputs",
    )
    assert violations(garbage) == []
    assert {v.fault for v in violations(replace(garbage, policy="horizon"))} == {
        Fault.OFFLOAD_UNDEFINED
    }


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


def test_resident_weight_may_come_back_without_a_stored_node() -> None:
    """The host master of a weight exists anyway; a STORED node only stands for it."""
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
