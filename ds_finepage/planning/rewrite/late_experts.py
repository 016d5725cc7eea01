"""Delays reloads of experts until the router has chosen: MemGraph -> MemGraph.

An early reload has to copy all experts of a layer; right after the router it copies just the chosen
ones. Extents stay the same, so only the order of nodes changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from ds_finepage.graph.memgraph import Edge, EdgeKind, MemGraph, Node, NodeKind
from ds_finepage.graph.routes import routes


def wait_for_routes(memgraph: MemGraph) -> MemGraph:
    """Move reloads of routed weights behind the tasks that choose their slices.

    A weight that stays resident for the next pass is not moved, because it has to be whole. Neither
    is one that a tight plan reloads more than once.

    Args:
        memgraph: A plan that passes the checker.

    Returns:
        The plan itself if nothing moves.
    """
    graph = memgraph.graph
    known = routes(graph)
    if not known:
        return memgraph
    computes: dict[int | None, int] = {}
    lives: dict[int, list[Node]] = {}
    for node in memgraph.nodes:
        if node.kind is NodeKind.COMPUTE:
            computes[node.task] = node.id
        elif node.buffer is not None:
            lives.setdefault(node.buffer, []).append(node)
    kept = {r.buffer for r in (*memgraph.exit, *memgraph.entry)}
    edges = {(e.before, e.after): e.kind for e in memgraph.edges}
    behind: dict[int, int] = {}
    routed: list[int] = []
    for buffer, route in known.items():
        use = computes[route.task]
        reloads = [n.id for n in lives.get(buffer, ()) if n.kind is NodeKind.RELOAD]
        if len(reloads) != 1 or reloads[0] > use or buffer in kept:
            continue
        (reload,) = reloads
        # The buffer that names the slices may have been offloaded in between.
        tells = lives[graph.tensors[route.tensor].buffer]
        back = [n.id for n in tells if n.kind is NodeKind.RELOAD and n.id < use]
        holder = max([computes[route.source], *back])
        ends = (NodeKind.DROP, NodeKind.OFFLOAD)  # every activation has one
        end = next(n.id for n in tells if n.id > use and n.kind in ends)
        behind[reload] = max(reload, holder)
        edges.setdefault((holder, reload), EdgeKind.DATA)
        edges.setdefault((reload, end), EdgeKind.READ_DROP)
        routed.append(buffer)
    if not routed:
        return memgraph
    moved = dataclasses.replace(memgraph, routed=tuple(sorted(routed)))
    return _reordered(moved, behind, edges)


def _reordered(
    memgraph: MemGraph, behind: Mapping[int, int], edges: Mapping[tuple[int, int], EdgeKind]
) -> MemGraph:
    """Return a plan with these edges, in which nodes come right behind others, in their order."""
    order = sorted(range(len(memgraph.nodes)), key=lambda n: (behind.get(n, n), n in behind, n))
    new_id = {old: new for new, old in enumerate(order)}
    # Most nodes keep their ids, and tuples are sorted faster than edges.
    found = [memgraph.nodes[n] for n in order]
    renumbered = sorted((new_id[b], new_id[a], kind) for (b, a), kind in edges.items())
    return dataclasses.replace(
        memgraph,
        nodes=tuple(n if n.id == i else dataclasses.replace(n, id=i) for i, n in enumerate(found)),
        edges=tuple(Edge(*edge) for edge in renumbered),
    )
