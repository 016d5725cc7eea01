"""Taskgraphs written as text, and memgraphs read back as text, for tests."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

from ds_finepage.graph.memgraph import EdgeKind, MemGraph, Node, Residency
from ds_finepage.graph.taskgraph import JOIN, Buffer, BufferKind, Task, TaskGraph
from ds_finepage.planning.policies import POLICIES, policy_named
from ds_finepage.planning.problem import Problem
from ds_finepage.reporting.memory import change_at

PAGING = sorted(name for name, policy in POLICIES.items() if policy.pages)
KINDS = {kind.value[0]: kind for kind in BufferKind}  # w(eight), s(tate), a(ctivation), ...


def sketch(buffers: str, *tasks: str) -> TaskGraph:
    """Build a taskgraph.

    Args:
        buffers: ``"w1:64 w2:64 a:128"``: names with sizes in bytes; the first letter is the kind.
        *tasks: ``"w1 a -> a b ~ c"``: reads, writes, touches; ``"join c ->"`` is a join.
    """
    made = []
    for i, named in enumerate(buffers.split()):
        name, nbytes = named.split(":")
        made.append(Buffer(i, KINDS[name[0]], int(nbytes), name))
    ids = {b.name: b.id for b in made}

    def numbers(text: str) -> tuple[int, ...]:
        return tuple(sorted({ids[name] for name in text.split()}))

    found = []
    for i, text in enumerate(tasks):
        joins, text = text.startswith("join "), text.removeprefix("join ")
        before, _, touches = text.partition("~")
        reads, _, writes = before.partition("->")
        found.append(
            Task(
                i,
                JOIN if joins else "aten.op.default",
                f"layer{i}",
                reads=numbers(reads),
                writes=numbers(writes),
                touches=numbers(touches),
            )
        )
    return TaskGraph("sketch", tuple(made), (), tuple(found))


def chain(num_weights: int, nbytes: int = 64, activation_bytes: int = 64) -> TaskGraph:
    """Build a chain: each task reads a weight of its own and changes one activation."""
    return sketch(
        " ".join(f"w{i}:{nbytes}" for i in range(num_weights)) + f" a:{activation_bytes}",
        *("w0 -> a" if i == 0 else f"w{i} a -> a" for i in range(num_weights)),
    )


def names(memgraph: MemGraph) -> list[str]:
    """Name every node: ``"alloc a"``, ``"alloc a 2"`` the second time, ``"compute 3"``."""
    seen: Counter[str] = Counter()
    found = []
    for node in memgraph.nodes:
        name = _name(memgraph.graph, node)
        seen[name] += 1
        found.append(f"{name} {seen[name]}" if seen[name] > 1 else name)
    return found


def _name(graph: TaskGraph, node: Node) -> str:
    what = node.task if node.buffer is None else graph.buffers[node.buffer].name
    return f"{node.kind.value} {what}"


def edges(memgraph: MemGraph, kind: EdgeKind | None = None) -> list[str]:
    """List the edges of a kind, or all, as ``"before > after"``."""
    named = names(memgraph)
    return [
        f"{named[e.before]} > {named[e.after]}"
        for e in memgraph.edges
        if kind is None or e.kind is kind
    ]


def offsets(memgraph: MemGraph) -> dict[str, int]:
    """Tell where each alloc and resident node places its buffer."""
    return {
        name: node.extent.offset
        for name, node in zip(names(memgraph), memgraph.nodes, strict=True)
        if node.extent is not None and name.split()[0] in ("alloc", "resident")
    }


def largest_live_bytes(memgraph: MemGraph) -> int:
    """Return the largest sum of extents that are allocated together, in the order of nodes."""
    return max(accumulate(map(change_at, memgraph.nodes)), default=0)


def plan(
    graph: TaskGraph,
    *,
    arena_bytes: int,
    policy: str,
    alignment: int = 64,
    entry: tuple[Residency, ...] = (),
) -> MemGraph:
    """Plan one pass, for few bytes."""
    return policy_named(policy).plan(Problem(graph, arena_bytes, alignment, entry=entry))
