"""Right memgraphs made by hand, and small changes to them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ds_finepage.graph.memgraph import Edge, EdgeKind, Extent, MemGraph, Node, NodeKind, Residency
from ds_finepage.graph.taskgraph import JOIN, Buffer, BufferKind, Task, TaskGraph, TensorView

LEFT, RIGHT = Extent(0, 128), Extent(128, 128)  # the two places of every arena here
PLACES = {"L": LEFT, "R": RIGHT, "M": Extent(64, 128)}
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


def memgraph(graph: TaskGraph, nodes: str, edges: str, **others: Any) -> MemGraph:
    """Build a memgraph.

    ``nodes`` is "kind, number of the task or buffer, place ..."; a place is L(eft), R(ight) or
    M(iddle). ``edges`` is "before>after ...".
    """
    made = []
    for i, (name, which, at) in enumerate(re.findall(r"([a-z]+)(\d+)([LRM]?)", nodes)):
        kind = NodeKind(name)
        if kind is NodeKind.COMPUTE:
            made.append(Node(i, kind, task=int(which)))
        else:
            made.append(Node(i, kind, buffer=int(which), extent=PLACES[at]))
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


RESIDENT, ALLOC = NodeKind.RESIDENT, NodeKind.ALLOC
RELOAD, COMPUTE = NodeKind.RELOAD, NodeKind.COMPUTE
OFFLOAD, DROP, COLLECT = NodeKind.OFFLOAD, NodeKind.DROP, NodeKind.COLLECT


def gathering(m: MemGraph, buffer: int) -> MemGraph:
    """Let a weight hold rows that each call chooses."""
    found = of_buffer(m, buffer, gather=0)
    indices = TensorView(0, buffer, "int64", (1,), (1,))
    return replace(found, graph=replace(found.graph, tensors=(indices,)))


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
        "resident0L alloc2R compute0 drop0L offload2R alloc1L reload1L compute1 "
        "alloc2R reload2R compute2 compute3 drop2R",
        "0>2 1>2 0>3 2>3 2>4 3>5 5>6 6>7 4>8 8>9 4>9 7>10 9>10 10>11 10>12 11>12",
        entry=(Residency(0, LEFT),),
        exit=(Residency(1, LEFT),),
        host_slots=((2, 0),),
        host_bytes=128,
    )


def collecting() -> MemGraph:
    """A weight of several ranks comes in two steps: the part of this rank, then the others."""
    graph = taskgraph("wo", task(0, reads=[0], writes=[1]))
    buffers = (replace(graph.buffers[0], name="w"), graph.buffers[1])
    return memgraph(
        replace(graph, buffers=buffers, parted=("w",), num_ranks=2),
        "alloc0L reload0L collect0L compute0",
        "0>1 1>2 2>3",
        exit=(Residency(0, LEFT),),
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
        "alloc0L compute0 compute1 offload0L alloc0L reload0L compute2 compute3 compute4 drop0L",
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
        "alloc0L alloc3R compute0 drop3R compute1 compute2 compute3 compute4 drop0L",
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
        "alloc0L compute0 offload0L alloc0L reload0L compute1 drop0L alloc0R "
        "reload0R compute2 offload0R alloc0R reload0R compute3 drop0R",
        # 4>10 keeps the second offload from overwriting what the first reload reads.
        "0>1 1>2 2>3 3>4 2>4 4>5 4>6 5>6 2>10 4>10 8>10 7>8 2>8 8>9 9>10 10>11 11>12 10>12 12>13 "
        "12>14 13>14",
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
