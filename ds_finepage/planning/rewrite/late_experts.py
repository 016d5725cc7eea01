"""Delays reloads of experts until the router has chosen: MemGraph -> MemGraph.

An early reload has to copy all experts of a layer; right after the router it copies just the chosen
ones. Extents stay the same, so only the order of nodes changes.

A tight plan may bring a weight in ahead and evict it again before its use. Then no reload of it can
wait, so experts lose such a reload.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence, Set

from ds_finepage.graph.memgraph import Edge, EdgeKind, MemGraph, Node, NodeKind
from ds_finepage.graph.routes import routes


def wait_for_routes(memgraph: MemGraph) -> MemGraph:
    """Move reloads of routed weights behind the tasks that choose their slices.

    A weight that stays resident for the next pass is not moved, because it has to be whole.

    Args:
        memgraph: A plan that passes the checker.

    Returns:
        The plan itself if nothing moves.
    """
    known = routes(memgraph.graph)
    if not known:
        return memgraph
    memgraph = _without_unused(memgraph, known.keys())
    computes = {n.task: n.id for n in memgraph.nodes if n.kind is NodeKind.COMPUTE}
    lives = _Lives(memgraph)
    moves: list[_Move] = []
    for buffer, route in known.items():
        reloads = lives.of(buffer, NodeKind.RELOAD)
        use = computes[route.task]
        if len(reloads) == 1 and reloads[0] < use and buffer not in lives.kept:
            tells = memgraph.graph.tensors[route.tensor].buffer
            # The buffer that names the slices may have been offloaded in between.
            back = [n for n in lives.of(tells, NodeKind.RELOAD) if n < use]
            holder = max([computes[route.source], *back])
            moves.append(_Move(buffer, reloads[0], holder, lives.vacator(tells, use)))
    return _rewritten(memgraph, moves) if moves else memgraph


def _without_unused(memgraph: MemGraph, weights: Set[int]) -> MemGraph:
    """Leave out stays of some weights in the arena that end before a use."""
    begun: dict[int, list[int]] = {}
    unused: set[int] = set()
    for node in memgraph.nodes:
        if node.kind is NodeKind.COMPUTE:
            for buffer in memgraph.graph.tasks[node.task or 0].reads:
                begun.pop(buffer, None)
        elif node.buffer is None or node.buffer not in weights:
            continue
        elif node.kind is NodeKind.ALLOC:
            begun[node.buffer] = [node.id]
        elif node.buffer in begun:
            begun[node.buffer].append(node.id)
            if node.kind is NodeKind.DROP:
                unused.update(begun.pop(node.buffer))
    if not unused:
        return memgraph
    # A node that waited for one of them now waits for those that it waited for.
    waits: dict[int, set[int]] = {}
    edges: dict[tuple[int, int], EdgeKind] = {}
    for edge in sorted(memgraph.edges, key=lambda e: (e.after, e.before)):
        before = waits.get(edge.before, set()) if edge.before in unused else {edge.before}
        if edge.after in unused:
            waits.setdefault(edge.after, set()).update(before)
        else:
            for held in before:
                edges.setdefault((held, edge.after), edge.kind)
    left = [n for n in range(len(memgraph.nodes)) if n not in unused]
    return _renumbered(memgraph, left, edges)


class _Lives:
    """The nodes of each buffer."""

    def __init__(self, memgraph: MemGraph) -> None:
        self._nodes: dict[int, list[Node]] = {}
        for node in memgraph.nodes:
            if node.buffer is not None:
                self._nodes.setdefault(node.buffer, []).append(node)
        self.kept = {r.buffer for r in (*memgraph.exit, *memgraph.entry)}

    def of(self, buffer: int, kind: NodeKind) -> list[int]:
        return [n.id for n in self._nodes.get(buffer, []) if n.kind is kind]

    def vacator(self, buffer: int, after: int) -> int:
        """Return the node that vacates the buffer's bytes next; every activation has one."""
        ends = (NodeKind.DROP, NodeKind.OFFLOAD)
        return next(n.id for n in self._nodes[buffer] if n.id > after and n.kind in ends)


@dataclasses.dataclass(frozen=True, slots=True)
class _Move:
    """A reload to delay."""

    buffer: int
    reload: int
    holder: int  # the node that holds the buffer that names the slices
    end: int  # the node that vacates that buffer


def _rewritten(memgraph: MemGraph, moves: list[_Move]) -> MemGraph:
    edges = {(e.before, e.after): e.kind for e in memgraph.edges}
    behind: dict[int, int] = {}
    for move in moves:
        behind[move.reload] = max(move.reload, move.holder)
        edges.setdefault((move.holder, move.reload), EdgeKind.DATA)
        edges.setdefault((move.reload, move.end), EdgeKind.READ_DROP)
    # A moved node comes right after the one that it waits for; moved ones keep their order.
    order = sorted(range(len(memgraph.nodes)), key=lambda n: (behind.get(n, n), n in behind, n))
    routed = tuple(sorted(move.buffer for move in moves))
    return dataclasses.replace(_renumbered(memgraph, order, edges), routed=routed)


def _renumbered(
    memgraph: MemGraph, order: Sequence[int], edges: Mapping[tuple[int, int], EdgeKind]
) -> MemGraph:
    """Return a plan with these of its nodes, in this order, and with these edges."""
    new_id = {old: new for new, old in enumerate(order)}
    # Most nodes keep their ids, and tuples are sorted faster than edges.
    found = [memgraph.nodes[n] for n in order]
    renumbered = sorted((new_id[b], new_id[a], kind) for (b, a), kind in edges.items())
    return dataclasses.replace(
        memgraph,
        nodes=tuple(n if n.id == i else dataclasses.replace(n, id=i) for i, n in enumerate(found)),
        edges=tuple(Edge(*edge) for edge in renumbered),
    )
