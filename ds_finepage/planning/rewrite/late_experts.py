"""Lets reloads of experts wait until the pass knows which it uses: MemGraph -> MemGraph.

Early, a reload has to bring in all experts of a layer; right behind the router, just those that it
chose. What is reserved stays the same, so nothing but the order of nodes changes.
"""

from __future__ import annotations

import dataclasses

from ds_finepage.graph.memgraph import Edge, EdgeKind, MemGraph, Node, NodeKind
from ds_finepage.graph.routes import routes


def wait_for_routes(memgraph: MemGraph) -> MemGraph:
    """Move reloads of weights behind the tasks that tell which slices of them are used.

    A weight that stays resident for the next pass is left alone: it has to be whole.

    Args:
        memgraph: A plan that passes the checker.

    Returns:
        The plan itself where there is nothing to gain.
    """
    known = routes(memgraph.graph)
    if not known:
        return memgraph
    computes = {n.task: n.id for n in memgraph.nodes if n.kind is NodeKind.COMPUTE}
    lives = _Lives(memgraph)
    moves: list[_Move] = []
    for buffer, route in known.items():
        reloads = lives.of(buffer, NodeKind.RELOAD)
        use = computes[route.task]
        if len(reloads) == 1 and reloads[0] < use and buffer not in lives.kept:
            tells = memgraph.graph.tensors[route.tensor].buffer
            # What tells the slices may have been away in between.
            back = [n for n in lives.of(tells, NodeKind.RELOAD) if n < use]
            holder = max([computes[route.source], *back])
            moves.append(_Move(buffer, reloads[0], holder, lives.vacator(tells, use)))
    return _rewritten(memgraph, moves) if moves else memgraph


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
    """A reload that is to wait."""

    buffer: int
    reload: int
    holder: int  # of what tells the slices, while they are used
    end: int  # where it goes


def _rewritten(memgraph: MemGraph, moves: list[_Move]) -> MemGraph:
    edges = {(e.before, e.after): e.kind for e in memgraph.edges}
    behind: dict[int, int] = {}
    for move in moves:
        behind[move.reload] = max(move.reload, move.holder)
        edges.setdefault((move.holder, move.reload), EdgeKind.DATA)
        edges.setdefault((move.reload, move.end), EdgeKind.READ_DROP)
    # A node that moves comes right behind the one that it waits for, moved ones as they were.
    order = sorted(range(len(memgraph.nodes)), key=lambda n: (behind.get(n, n), n in behind, n))
    new_id = {old: new for new, old in enumerate(order)}
    return dataclasses.replace(
        memgraph,
        nodes=tuple(dataclasses.replace(memgraph.nodes[n], id=new_id[n]) for n in order),
        edges=tuple(sorted(Edge(new_id[b], new_id[a], k) for (b, a), k in edges.items())),
        routed=tuple(sorted(move.buffer for move in moves)),
    )
