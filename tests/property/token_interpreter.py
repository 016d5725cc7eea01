"""Runs a memgraph on tokens instead of numbers, in a random order that obeys its edges.

The arena is real down to the byte: it is cut at every border of every extent, and each piece knows
which buffer owns it and which token lies there. A token says whose value it is: the buffer, the
last task that wrote all of it, and the touches since. What a task must find is worked out from the
taskgraph alone, so a missing wait shows as a wrong token, a wrong owner or a byte given away twice.
Nothing is taken from the checker.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from ds_finepage.graph.memgraph import Extent, MemGraph, Node, NodeKind
from ds_finepage.graph.taskgraph import JOIN, BufferKind, Task, TaskGraph

NOBODY = -2  # wrote nothing yet
CALLER = -1  # gave the contents before the pass


@dataclass(frozen=True)
class Token:
    """Stands for the value of a buffer."""

    buffer: int
    writer: int = NOBODY
    touches: frozenset[int] = frozenset()


def run_random_order(memgraph: MemGraph, rng: random.Random) -> None:
    """Run a memgraph in one random topological order of its edges, and nothing but its edges.

    Raises:
        AssertionError: A task finds a wrong token, bytes have two owners or lie outside the arena,
            a reload brings back something else than in the order of ids, or the pass ends with
            the wrong contents anywhere.
    """
    in_order = _Interpreter(memgraph)
    in_order.run(range(len(memgraph.nodes)))
    shuffled = _Interpreter(memgraph)
    shuffled.run(random_topological_order(memgraph, rng))
    for node, token in in_order.copied.items():
        other = shuffled.copied[node]
        assert other == token, f"node {node} copies {other}; in the order of ids {token}"


def random_topological_order(memgraph: MemGraph, rng: random.Random) -> list[int]:
    """Draw an order of the nodes that obeys the edges.

    Half of the time the next node is any that may start. The other half, each node has a rank and
    the lowest may go first, so that some nodes come as late as they possibly can.
    """
    waits = [0] * len(memgraph.nodes)
    behind: list[list[int]] = [[] for _ in memgraph.nodes]
    for edge in memgraph.edges:
        waits[edge.after] += 1
        behind[edge.before].append(edge.after)
    ranks = [rng.random() for _ in memgraph.nodes]
    is_ranked = rng.random() < 0.5
    ready = [(ranks[n], n) for n, count in enumerate(waits) if count == 0]
    heapify(ready)
    order = []
    while ready:
        _, node = heappop(ready)
        order.append(node)
        for after in behind[node]:
            waits[after] -= 1
            if waits[after] == 0:
                heappush(ready, (ranks[after], after))
                if not is_ranked:  # new ranks for all: any of them may be next
                    ready = [(rng.random(), n) for _, n in ready]
                    heapify(ready)
    assert len(order) == len(memgraph.nodes), "the edges have a cycle"
    return order


class _Interpreter:
    """One run."""

    def __init__(self, memgraph: MemGraph) -> None:
        self.memgraph = memgraph
        self.graph = memgraph.graph
        self.expected, self.final = _program_order(self.graph)
        borders = {0, memgraph.arena_bytes}
        for node in memgraph.nodes:
            if node.extent is not None:
                assert node.extent.offset >= 0, f"{_title(node)} begins before the arena"
                assert node.extent.end <= memgraph.arena_bytes, f"{_title(node)} leaves the arena"
                borders |= {node.extent.offset, node.extent.end}
        self.borders = sorted(borders)
        self.owner: list[int | None] = [None] * len(self.borders)  # of the piece from each border
        self.token: list[Token | None] = [None] * len(self.borders)
        self.host: dict[int, Token] = {}
        self.outside = {
            b.id: _at_start(self.graph, b.id) for b in self.graph.buffers if not b.kind.is_paged
        }
        self.copied: dict[int, Token] = {}  # by RELOAD and OFFLOAD node
        for node in memgraph.nodes:
            if node.kind is NodeKind.RESIDENT:
                assert node.buffer is not None
                assert node.extent is not None
                self._own(node, node.buffer, node.extent, Token(node.buffer, CALLER))

    def run(self, order: range | list[int]) -> None:
        """Run all nodes in an order, then look at what is left."""
        for node in order:
            self._step(self.memgraph.nodes[node])
        self._end()

    # Bytes.

    def _pieces(self, extent: Extent) -> range:
        return range(
            bisect_left(self.borders, extent.offset), bisect_left(self.borders, extent.end)
        )

    def _own(self, node: Node, buffer: int, extent: Extent, token: Token) -> None:
        for piece in self._pieces(extent):
            owner = self.owner[piece]
            assert owner is None, (
                f"{_title(node)} takes byte {self.borders[piece]}, which buffer {owner} owns"
            )
            self.owner[piece], self.token[piece] = buffer, token

    def _disown(self, extent: Extent) -> None:
        for piece in self._pieces(extent):
            self.owner[piece] = self.token[piece] = None

    def _load(self, node: Node, buffer: int, extent: Extent) -> Token:
        """The token in an extent; the same in all its bytes."""
        needed = Extent(extent.offset, self.graph.buffers[buffer].nbytes)
        assert needed.nbytes <= extent.nbytes, f"{_title(node)}: {extent} is too small"
        tokens: dict[Token, None] = {}
        for piece in self._pieces(extent):
            owner, token = self.owner[piece], self.token[piece]
            assert owner == buffer, (
                f"{_title(node)}: byte {self.borders[piece]} belongs to buffer {owner}, "
                f"not to {buffer}"
            )
            assert token is not None
            tokens[token] = None
        assert len(tokens) == 1, f"{_title(node)} finds a mixture in buffer {buffer}: {[*tokens]}"
        return next(iter(tokens))

    def _store(self, extent: Extent, token: Token) -> None:
        for piece in self._pieces(extent):
            self.token[piece] = token

    # Nodes.

    def _step(self, node: Node) -> None:
        if node.kind is NodeKind.RESIDENT:
            return
        if node.kind is NodeKind.COMPUTE:
            self._compute(node)
            return
        buffer, extent = node.buffer, node.extent
        assert buffer is not None
        assert extent is not None
        if node.kind is NodeKind.ALLOC:
            self._own(node, buffer, extent, Token(buffer))
            return
        token = self._load(node, buffer, extent)  # proves that the buffer owns the bytes, too
        if node.kind is NodeKind.RELOAD:
            given = self.graph.buffers[buffer].kind is BufferKind.WEIGHT
            master = Token(buffer, CALLER) if given else None
            copy = self.host.get(buffer, master)
            assert copy is not None, f"{_title(node)} finds no copy on the host"
            self._finds_what_tells(node)
            self._store(extent, copy)
            self.copied[node.id] = copy
        elif node.kind is NodeKind.OFFLOAD:
            self.host[buffer] = self.copied[node.id] = token
            self._disown(extent)
        else:
            assert node.kind is NodeKind.DROP
            self._disown(extent)

    def _finds_what_tells(self, node: Node) -> None:
        """A routed reload reads what tells the slices, where its task will find it."""
        route = self.memgraph.routed_reloads.get(node.id)
        if route is None:
            return
        buffer = self.graph.tensors[route.tensor].buffer
        (at,) = (n.id for n in self.memgraph.nodes if n.task == route.task)
        found = self._load(node, buffer, self.memgraph.placements[at][buffer])
        assert found == self.expected[route.task][buffer], f"{_title(node)} reads {found}"

    def _compute(self, node: Node) -> None:
        assert node.task is not None
        task = self.graph.tasks[node.task]
        places = self.memgraph.placements[node.id]
        for buffer in task.buffers:
            if self.graph.buffers[buffer].kind.is_paged:
                assert buffer in places, f"{task.where}: buffer {buffer} has no place"
                found = self._load(node, buffer, places[buffer])
            else:
                found = self.outside[buffer]
            expected = self.expected[task.index][buffer]
            if buffer in task.reads:
                assert found == expected, f"{task.where} reads {found}; it should be {expected}"
            if buffer in task.touches:
                assert found.writer == expected.writer, (
                    f"{task.where} touches {found}; it should be {expected}"
                )
            after = _after(task, found)
            if self.graph.buffers[buffer].kind.is_paged:
                self._store(places[buffer], after)
            else:
                self.outside[buffer] = after

    def _end(self) -> None:
        for buffer, token in self.outside.items():
            assert token == self.final[buffer], (
                f"buffer {buffer} ends as {token}; it should be {self.final[buffer]}"
            )
        end = Node(len(self.memgraph.nodes), NodeKind.RESIDENT)  # only to name it
        for residency in self.memgraph.exit:
            token = self._load(end, residency.buffer, residency.extent)
            assert token == Token(residency.buffer, CALLER), f"exit: {token} is not the weight"
            self._disown(residency.extent)
        left = [b for b in self.owner if b is not None]
        assert not left, f"buffers {left} own bytes at the end and are not in exit"


def _title(node: Node) -> str:
    what = f"task {node.task}" if node.task is not None else f"buffer {node.buffer}"
    return f"node {node.id} ({node.kind.value} {what})"


def _at_start(graph: TaskGraph, buffer: int) -> Token:
    made = graph.buffers[buffer].kind in (BufferKind.ACTIVATION, BufferKind.OUTPUT)
    return Token(buffer, NOBODY if made else CALLER)


def _after(task: Task, token: Token) -> Token:
    """What a task leaves behind in a buffer in which it found a token."""
    b = token.buffer
    if b in task.writes or (task.op == JOIN and b in task.reads and token.touches):
        token = Token(b, task.index)
    if b in task.touches:
        token = Token(b, token.writer, token.touches | {task.index})
    return token


def _program_order(graph: TaskGraph) -> tuple[list[dict[int, Token]], dict[int, Token]]:
    """What each task must find, and what must be there in the end."""
    now = {b.id: _at_start(graph, b.id) for b in graph.buffers}
    expected = []
    for task in graph.tasks:
        expected.append({b: now[b] for b in task.buffers})
        for b in task.buffers:
            now[b] = _after(task, now[b])
    return expected, now
