"""Writes a memgraph node by node, and derives its edges.

A policy decides the next node; the builder knows the nodes that it has to wait for.
Source of the edge kinds: Turnip (arXiv 2405.16283), memgraph construction.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_finepage.graph.memgraph import (
    Edge,
    EdgeKind,
    Extent,
    MemGraph,
    Node,
    NodeKind,
    Residency,
)
from ds_finepage.graph.taskgraph import JOIN, BufferKind, Task, TaskGraph
from ds_finepage.units import align_up


@dataclass(slots=True)
class BufferState:
    """The state of one buffer at the current end of the memgraph.

    Invariant: ``extent`` is None exactly while the buffer owns no arena bytes. ``holder`` is the
    node that made the contents, None while there are none. ``users`` are the nodes that used the
    buffer since it became resident. ``offload`` is None where no node made the host copy: the
    master of a weight is there before the pass begins.
    """

    extent: Extent | None = None
    alloc: int | None = None
    holder: int | None = None
    readers: list[int] = field(default_factory=list)  # of the present contents
    touches: list[int] = field(default_factory=list)  # not yet joined
    users: list[int] = field(default_factory=list)
    is_on_host: bool = False  # host memory holds the present contents
    offload: int | None = None  # the node that put them there
    slot_users: list[int] = field(default_factory=list)  # last offload and the reloads since


class MemGraphBuilder:
    """Appends nodes in a topological order."""

    def __init__(self, graph: TaskGraph, policy: str, arena_bytes: int, alignment: int) -> None:
        """Start an empty memgraph for ``graph``."""
        self._graph = graph
        self._policy = policy
        self._arena_bytes = arena_bytes
        self._alignment = alignment
        self._nodes: list[Node] = []
        self._edges: dict[tuple[int, int], EdgeKind] = {}
        self._entry: list[Residency] = []
        self._host_slots: dict[int, int] = {}
        self._host_bytes = 0
        self._touched = {b for task in graph.tasks for b in task.touches}
        self.states = [BufferState() for _ in graph.buffers]

    def _add(
        self,
        kind: NodeKind,
        buffer: int | None = None,
        task: int | None = None,
        extent: Extent | None = None,
    ) -> int:
        node = Node(len(self._nodes), kind, buffer, task, extent)
        self._nodes.append(node)
        return node.id

    def _edge(self, before: int | None, after: int, kind: EdgeKind) -> None:
        if before is not None and before != after:
            self._edges.setdefault((before, after), kind)

    def begin(self, entry: tuple[Residency, ...]) -> None:
        """Note where each weight is before the pass: in its extent, or in host memory alone.

        Args:
            entry: The resident weights, with their extents.
        """
        for residency in entry:
            state = self.states[residency.buffer]
            state.extent = residency.extent
            state.holder = self._add(NodeKind.RESIDENT, residency.buffer, extent=residency.extent)
            self._entry.append(residency)
        for buffer in self._graph.buffers:
            # A resident weight has its master copy in host memory too: it is always clean.
            self.states[buffer.id].is_on_host = buffer.kind is BufferKind.WEIGHT

    def alloc(self, buffer: int, extent: Extent, vacators: list[int]) -> None:
        """Give an extent to a buffer.

        Args:
            buffer: The buffer, which has no extent yet.
            extent: Its place in the arena.
            vacators: The nodes that vacated these bytes; the alloc waits for them.
        """
        state = self.states[buffer]
        assert state.extent is None
        state.extent = extent
        state.alloc = self._add(NodeKind.ALLOC, buffer, extent=extent)
        state.users = []
        for vacator in vacators:
            self._edge(vacator, state.alloc, EdgeKind.MEMORY)

    def reload(self, buffer: int) -> int:
        """Reload the contents from host memory into the extent.

        Returns:
            The node after which they are there: for a parted weight, the one that collects the
            parts of the other ranks.
        """
        state = self.states[buffer]
        assert state.alloc is not None and state.is_on_host
        node = self._add(NodeKind.RELOAD, buffer, extent=state.extent)
        self._edge(state.alloc, node, EdgeKind.ALLOC)
        self._edge(state.offload, node, EdgeKind.STORE_RELOAD)
        state.slot_users.append(node)
        if self._graph.num_parts(self._graph.buffers[buffer]) > 1:
            part, node = node, self._add(NodeKind.COLLECT, buffer, extent=state.extent)
            self._edge(part, node, EdgeKind.DATA)
        state.holder, state.readers = node, []
        return node

    def sync(self, before: int, after: int) -> None:
        """Make a node wait for an earlier one that it does not depend on."""
        self._edge(before, after, EdgeKind.SYNC)

    def compute(self, task: Task) -> int:
        """Run a task after everything that it needs; return the node."""
        node = self._add(NodeKind.COMPUTE, task=task.index)
        for buffer in self._graph.buffers_of[task.index]:
            state = self.states[buffer]
            is_read, is_written = buffer in task.reads, buffer in task.writes
            is_join = task.op == JOIN and buffer in self._touched
            if is_join:
                for touch in state.touches:
                    self._edge(touch, node, EdgeKind.JOIN)
                self._edge(state.holder, node, EdgeKind.DATA)
                self._hold(state, node)
            elif is_read:
                self._edge(state.holder, node, EdgeKind.DATA)
            if state.holder is None and not state.touches:
                self._edge(state.alloc, node, EdgeKind.ALLOC)
            if is_written:
                self._edge(state.holder, node, EdgeKind.ORDER)
                for reader in state.readers:
                    self._edge(reader, node, EdgeKind.ORDER)
                self._hold(state, node)
            elif buffer in task.touches:
                self._edge(state.alloc, node, EdgeKind.ALLOC)
                self._edge(state.holder, node, EdgeKind.ORDER)
                for reader in state.readers:
                    self._edge(reader, node, EdgeKind.ORDER)
                state.touches.append(node)
                state.is_on_host = False
            elif is_read and not is_join:
                state.readers.append(node)
            state.users.append(node)
        return node

    @staticmethod
    def _hold(state: BufferState, node: int) -> None:
        state.holder, state.readers, state.touches = node, [], []
        state.is_on_host = False

    def evict(self, buffer: int, *, is_needed: bool = True, copies_clean: bool = False) -> int:
        """Take a buffer's extent away; keep its contents in host memory if they are needed.

        Args:
            buffer: The victim.
            is_needed: False if the next use overwrites the contents.
            copies_clean: Copy the contents even if a valid host copy exists.

        Returns:
            The node that vacates the bytes: a drop if a valid host copy exists (clean), if nothing
            was written yet, or if the contents are not needed; otherwise an offload.
        """
        state = self.states[buffer]
        is_written = state.holder is not None or bool(state.touches)
        is_clean = state.is_on_host and not copies_clean
        if is_clean or not is_written or not is_needed:
            return self.drop(buffer)
        node = self._add(NodeKind.OFFLOAD, buffer, extent=state.extent)
        # A buffer has one host slot: its old copy must be read before it is overwritten.
        for user in state.slot_users:
            self._edge(user, node, EdgeKind.STORE_RELOAD)
        state.slot_users = [node]
        self._after_users(state, node, EdgeKind.USE_OFFLOAD)
        if buffer not in self._host_slots:
            self._host_slots[buffer] = self._host_bytes
            nbytes = self._graph.buffers[buffer].nbytes
            self._host_bytes += align_up(nbytes, self._alignment)
        state.is_on_host, state.offload = True, node
        self._vacate(state)
        return node

    def drop(self, buffer: int) -> int:
        """Free an extent without a copy; return the node that vacates the bytes."""
        state = self.states[buffer]
        node = self._add(NodeKind.DROP, buffer, extent=state.extent)
        self._after_users(state, node, EdgeKind.READ_DROP)
        self._vacate(state)
        return node

    def _after_users(self, state: BufferState, node: int, kind: EdgeKind) -> None:
        for user in state.users:
            self._edge(user, node, kind)
        self._edge(state.holder, node, kind)
        self._edge(state.alloc, node, kind)

    @staticmethod
    def _vacate(state: BufferState) -> None:
        state.extent = state.alloc = state.holder = None
        # The offload keeps the touches, and the reload brings them back.
        state.readers, state.touches, state.users = [], [], []

    def finish(self) -> MemGraph:
        """Return the memgraph; the buffers that are resident now are its exit residency."""
        left = tuple(
            Residency(buffer, state.extent)
            for buffer, state in enumerate(self.states)
            if state.extent is not None
        )
        return MemGraph(
            graph=self._graph,
            policy=self._policy,
            arena_bytes=self._arena_bytes,
            alignment=self._alignment,
            nodes=tuple(self._nodes),
            edges=tuple(Edge(b, a, self._edges[b, a]) for b, a in sorted(self._edges)),
            entry=tuple(self._entry),
            exit=left,
            host_slots=tuple(sorted(self._host_slots.items())),
            host_bytes=self._host_bytes,
        )
