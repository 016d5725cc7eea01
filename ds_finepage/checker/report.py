"""The violations that the checker has found, and the messages that name them."""

from __future__ import annotations

from collections.abc import Iterable

from ds_finepage.checker.faults import Fault, Violation
from ds_finepage.checker.shape import title_of
from ds_finepage.graph.memgraph import Extent, MemGraph, Node


class Report:
    """Collects violations; knows which nodes wait for which."""

    def __init__(self, memgraph: MemGraph) -> None:
        self.memgraph = memgraph
        self.found: list[Violation] = []
        self._edges = {(e.before, e.after) for e in memgraph.edges}

    def wrong(self, fault: Fault, node: int | None, message: str) -> None:
        """Add a violation.

        The message is the rest of a sentence that begins with the node, if there is one.
        """
        where = "" if node is None else f"{self.title(node)} "
        self.found.append(Violation(fault, node, where + message))

    def title(self, node: int) -> str:
        """Return a node as a message names it."""
        found, graph = self.memgraph.nodes[node], self.memgraph.graph
        if found.task is not None:
            return f"node {node} ({graph.tasks[found.task].where})"
        assert found.buffer is not None
        return f"node {node} ({found.kind.value} {title_of(graph, found.buffer)})"

    def require_waits(
        self, fault: Fault, before: Iterable[int | None], after: int, why: str
    ) -> None:
        """Require an edge from each of some nodes to one node.

        ``why`` is the role of the first nodes, for the message.
        """
        for b in before:
            if b is not None and (b, after) not in self._edges:
                self.wrong(fault, after, f"does not wait for {why}, {self.title(b)}")


def placed(node: Node) -> tuple[int, Extent]:
    """Return the buffer and the extent of a node that has both."""
    assert node.buffer is not None
    assert node.extent is not None
    return node.buffer, node.extent


def span(extent: Extent) -> str:
    """Return an extent as a message names it."""
    return f"[{extent.offset}, {extent.end})"
