"""The checker's walk over the nodes of a memgraph; see the note in checker.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import ClassVar

from ds_finepage.checker.faults import Fault, Violation
from ds_finepage.checker.shape import title_of
from ds_finepage.checker.state import (
    GIVEN,
    INITIAL,
    UNDEFINED,
    Bytes,
    Contents,
    Life,
    contents_at_start,
    joins_touches,
    program_order,
)
from ds_finepage.graph.memgraph import Extent, MemGraph, Node, NodeKind, Residency
from ds_finepage.graph.taskgraph import BufferKind, Task


class Walk:
    """One walk over the nodes of a well-shaped memgraph."""

    def __init__(self, memgraph: MemGraph) -> None:
        graph = memgraph.graph
        self.memgraph = memgraph
        self.graph = graph
        self.is_published = memgraph.policy.startswith("published")
        self.found: list[Violation] = []
        self.edges = {(e.before, e.after) for e in memgraph.edges}
        self.routed = set(memgraph.routed)
        self.kept = {r.buffer for r in memgraph.exit}
        self.expected, self.final = program_order(graph)
        self.latest = contents_at_start(graph)  # newest contents of each buffer, wherever they are
        self.uses: list[list[Task]] = [[] for _ in graph.buffers]  # in program order, last first
        for task in reversed(graph.tasks):
            for b in task.buffers:
                self.uses[b].append(task)
        self.computed: set[int] = set()

        self.bytes = Bytes()
        self.lives = {
            b.id: Life(self.latest[b.id], None) for b in graph.buffers if not b.kind.is_paged
        }
        self.host = {  # contents of the host copies
            b.id: INITIAL for b in graph.buffers if b.kind is BufferKind.WEIGHT
        }
        self.host_source: dict[int, int] = {}  # node that put the host copy there
        self.host_users: dict[int, list[int]] = {}  # nodes that used the pinned slot, first to last
        self.started_resident: set[int] = set()

    def run(self) -> list[Violation]:
        """Find everything that is wrong."""
        self._tasks_once()
        self._entry()
        self._stored()
        for node in self.memgraph.nodes:
            self._step[node.kind](self, node)
        self._host_slots()
        self._exit()
        return self.found

    def wrong(self, fault: Fault, node: int | None, message: str) -> None:
        """Note a violation."""
        where = "" if node is None else f"node {node} ({self._title(self.memgraph.nodes[node])}) "
        self.found.append(Violation(fault, node, where + message))

    def _title(self, node: Node) -> str:
        if node.task is not None:
            return self.graph.tasks[node.task].where
        assert node.buffer is not None
        return f"{node.kind.value} {title_of(self.graph, node.buffer)}"

    def wait(self, fault: Fault, before: Iterable[int | None], after: int, why: str) -> None:
        """Ask for an edge from each of some nodes to one node."""
        for b in before:
            if b is not None and (b, after) not in self.edges:
                title = self._title(self.memgraph.nodes[b])
                self.wrong(fault, after, f"does not wait for {why}, node {b} ({title})")

    # -- before and after the walk

    def _tasks_once(self) -> None:
        times = Counter(n.task for n in self.memgraph.nodes if n.task is not None)
        for task in self.graph.tasks:
            if times[task.index] == 0:
                self.wrong(Fault.TASK_MISSING, None, f"{task.where} is not computed")
            elif times[task.index] > 1:
                text = f"{task.where} is computed {times[task.index]} times"
                self.wrong(Fault.TASK_REPEATED, None, text)

    def _entry(self) -> None:
        """Entry residency: there from the start, wherever its nodes stand in the list."""
        there: list[Residency] = []
        for node in self.memgraph.nodes:
            if node.kind is not NodeKind.RESIDENT:
                continue
            buffer, extent = _placed(node)
            there.append(Residency(buffer, extent))
            if not self._is_placeable(node):
                continue
            if self.graph.buffers[buffer].kind is not BufferKind.WEIGHT:
                self.wrong(Fault.ENTRY_MISMATCH, node.id, "is not a weight")
            if self.graph.buffers[buffer].gather is not None:
                self.wrong(Fault.GATHER_KEPT, node.id, "holds what the last call brought")
            if buffer in self.lives:
                self.wrong(Fault.ALREADY_LIVE, node.id, "is resident twice")
                continue
            for segment in self.bytes.take(extent, buffer):
                if segment.tenant is not None:
                    other = title_of(self.graph, segment.tenant)
                    self.wrong(Fault.OVERLAP, node.id, f"at {_span(extent)} overlaps {other}")
            self.lives[buffer] = Life(INITIAL, node.id, extent)
            self.started_resident.add(buffer)
        self._same_residency(Fault.ENTRY_MISMATCH, "entry", self.memgraph.entry, there)

    def _stored(self) -> None:
        for node in self.memgraph.nodes:
            if node.kind is not NodeKind.STORED:
                continue
            assert node.buffer is not None
            if self.graph.buffers[node.buffer].kind is not BufferKind.WEIGHT:
                self.wrong(Fault.STORED_WRONG, node.id, "is not a weight")
            elif node.buffer in self.host_source:
                self.wrong(Fault.STORED_WRONG, node.id, "is stored twice")
            self.host_source[node.buffer] = node.id

    def _exit(self) -> None:
        left: list[Residency] = []
        for buffer, life in sorted(self.lives.items()):
            name = title_of(self.graph, buffer)
            if life.extent is None:
                if life.contents != self.final[buffer]:
                    text = f"{name} ends with other contents than program order gives it"
                    self.wrong(Fault.STALE_CONTENTS, None, text)
            elif self.graph.buffers[buffer].kind is not BufferKind.WEIGHT:
                self.wrong(Fault.NOT_RELEASED, life.holder, f"{name} is never dropped")
            elif life.contents.is_defined:
                left.append(Residency(buffer, life.extent))
            else:
                text = f"{name} has bytes at the end, but nothing was put there"
                self.wrong(Fault.EXIT_MISMATCH, life.holder, text)
        self._same_residency(Fault.EXIT_MISMATCH, "exit", self.memgraph.exit, left)

    def _same_residency(
        self, fault: Fault, what: str, listed: Sequence[Residency], true: Sequence[Residency]
    ) -> None:
        for difference, text in (
            (Counter(listed) - Counter(true), "lists {} at {}, which the nodes do not bear out"),
            (Counter(true) - Counter(listed), "does not list {} at {}"),
        ):
            for r in difference:
                known = 0 <= r.buffer < len(self.graph.buffers)
                name = title_of(self.graph, r.buffer) if known else f"buffer {r.buffer}"
                self.wrong(fault, None, f"{what} " + text.format(name, _span(r.extent)))

    def _host_slots(self) -> None:
        slots = Counter(b for b, _ in self.memgraph.host_slots)
        offloaded = {n.buffer for n in self.memgraph.nodes if n.kind is NodeKind.OFFLOAD}
        for buffer in self.graph.buffers:
            if slots[buffer.id] > 1 or (slots[buffer.id] == 0 and buffer.id in offloaded):
                name = title_of(self.graph, buffer.id)
                text = f"{name} has {slots[buffer.id]} host slots; it needs 1"
                self.wrong(Fault.HOST_SLOT_MISSING, None, text)
        end = 0
        for b, offset in sorted(self.memgraph.host_slots, key=lambda s: (s[1], s[0])):
            if not 0 <= b < len(self.graph.buffers):
                text = f"a host slot is for buffer {b}, which does not exist"
                self.wrong(Fault.HOST_SLOT_MISSING, None, text)
                continue
            slot = Extent(offset, self.graph.buffers[b].nbytes)
            text = f"host slot {_span(slot)} of {title_of(self.graph, b)} "
            if offset < 0 or slot.end > self.memgraph.host_bytes:
                text += f"is not inside {self.memgraph.host_bytes} bytes"
                self.wrong(Fault.HOST_SLOT_OUTSIDE, None, text)
            elif offset < end and slot.nbytes:
                self.wrong(Fault.HOST_SLOT_OVERLAP, None, text + "overlaps the one before it")
            end = max(end, slot.end)

    # -- one node

    def _is_placeable(self, node: Node) -> bool:
        """Look at buffer and extent of a node by themselves; False: leave the node out."""
        buffer, extent = _placed(node)
        if not self.graph.buffers[buffer].kind.is_paged:
            self.wrong(Fault.NOT_PAGED, node.id, "does not live in the arena")
            return False
        nbytes = self.graph.buffers[buffer].nbytes
        where = f"at {_span(extent)} "
        if extent.nbytes < nbytes:
            self.wrong(Fault.EXTENT_TOO_SMALL, node.id, where + f"is too small for {nbytes} bytes")
        if extent.offset % self.memgraph.alignment:
            text = where + f"does not begin at a multiple of {self.memgraph.alignment}"
            self.wrong(Fault.EXTENT_UNALIGNED, node.id, text)
        if extent.offset < 0 or extent.nbytes < 0 or extent.end > self.memgraph.arena_bytes:
            text = where + f"is not inside the arena of {self.memgraph.arena_bytes} bytes"
            self.wrong(Fault.EXTENT_OUTSIDE, node.id, text)
            return False
        return True

    def _life(self, node: Node) -> Life | None:
        """The life that a RELOAD, OFFLOAD or DROP belongs to."""
        if not self._is_placeable(node):
            return None
        buffer, extent = _placed(node)
        life = self.lives.get(buffer)
        if life is None:
            self.wrong(Fault.NOT_LIVE, node.id, "has no bytes in the arena at this point")
        elif life.extent is not None and life.extent != extent:
            text = f"at {_span(extent)} was given {_span(life.extent)}"
            self.wrong(Fault.EXTENT_CHANGED, node.id, text)
        return life

    def _at_start(self, node: Node) -> None:
        """RESIDENT and STORED were looked at before the walk."""

    def _alloc(self, node: Node) -> None:
        if not self._is_placeable(node):
            return
        buffer, extent = _placed(node)
        if buffer in self.lives:
            self.wrong(Fault.ALREADY_LIVE, node.id, "has bytes in the arena already")
            return
        vacators: dict[int, None] = {}  # each once, in order
        for segment in self.bytes.take(extent, buffer):
            if segment.vacator is not None:
                vacators[segment.vacator] = None
            elif segment.tenant is not None:
                other = title_of(self.graph, segment.tenant)
                self.wrong(Fault.OVERLAP, node.id, f"at {_span(extent)} overlaps live {other}")
        self.wait(Fault.NO_MEMORY_EDGE, vacators, node.id, "the vacator of its bytes")
        self.lives[buffer] = Life(UNDEFINED, node.id, extent, is_empty=True)

    def _reload(self, node: Node) -> None:
        life = self._life(node)
        if life is None:
            return
        buffer, _ = _placed(node)
        if not life.is_empty or life.contents.is_defined:
            self.wrong(Fault.RELOAD_OVERWRITES, node.id, "is reloaded over what is already there")
        else:
            self.wait(Fault.NO_ALLOC_EDGE, [life.holder], node.id, "its alloc")
        if buffer not in self.host or self.host[buffer] != self.latest[buffer]:
            self.wrong(Fault.NO_HOST_COPY, node.id, "has no valid copy on the host")
        source = self.host_source.get(buffer)
        if source is not None:
            self.wait(Fault.NO_STORE_RELOAD_EDGE, [source], node.id, "the node that stored it")
        elif self._is_weight(buffer) and buffer not in self.started_resident:
            text = "is neither resident at the start nor has a STORED node"
            self.wrong(Fault.STORED_WRONG, node.id, text)
        if buffer in self.routed:
            self._route(node)
        if buffer in self.host_users:
            self.host_users[buffer].append(node.id)
        life.hold(node.id, self.host.get(buffer, UNDEFINED))

    def _route(self, node: Node) -> None:
        """A reload of the used slices: it reads what tells them, as the task will find it."""
        route = self.memgraph.routed_reloads.get(node.id)
        if route is None:
            self.wrong(Fault.ROUTE_WRONG, node.id, "is routed, and nothing tells its slices")
            return
        if route.buffer in self.kept or route.task in self.computed:
            self.wrong(Fault.ROUTE_WRONG, node.id, "is of use to one task, and is kept for others")
        tells = self.graph.tensors[route.tensor].buffer
        life = self.lives.get(tells)
        name = title_of(self.graph, tells)
        if life is None or life.contents != self.expected[route.task][tells]:
            self.wrong(Fault.ROUTE_WRONG, node.id, f"finds other contents in {name} than its task")
            return
        self.wait(Fault.NO_DATA_EDGE, [life.holder], node.id, f"the holder of {name}")
        life.users.append(node.id)
        life.readers.append(node.id)
        life.recent_readers.append(node.id)

    def _compute(self, node: Node) -> None:
        assert node.task is not None
        task = self.graph.tasks[node.task]
        for buffer in task.buffers:
            life = self.lives.get(buffer)
            if life is None:
                name = title_of(self.graph, buffer)
                self.wrong(Fault.NOT_LIVE, node.id, f"needs {name}, which is not in the arena")
                self.latest[buffer] = self.latest[buffer].after(task, buffer)
                continue
            self._finds(node.id, task, buffer, life.contents)
            self._use(node.id, task, buffer, life)
            self.latest[buffer] = life.contents
        self.computed.add(task.index)

    def _finds(self, node: int, task: Task, buffer: int, contents: Contents) -> None:
        """What a task finds in a buffer must be what it finds in program order."""
        expected = self.expected[task.index][buffer]
        name = title_of(self.graph, buffer)
        if buffer in task.reads:
            if not contents.is_defined:
                self.wrong(Fault.UNDEFINED_READ, node, f"reads {name}, which holds nothing yet")
            elif contents.touches and not joins_touches(task, buffer):
                text = f"reads {name}, which was touched and not joined"
                self.wrong(Fault.UNJOINED_READ, node, text)
            elif contents != expected:
                text = f"reads {name} as {_saying(contents)}; it should be {_saying(expected)}"
                self.wrong(Fault.STALE_CONTENTS, node, text)
        elif buffer in task.touches and contents.writer != expected.writer:
            text = f"touches {name} as {_saying(contents)}; it should be {_saying(expected)}"
            self.wrong(Fault.STALE_CONTENTS, node, text)

    def _use(self, node: int, task: Task, buffer: int, life: Life) -> None:
        """Ask for the waits of a task on one of its buffers; then let it have its effect."""
        name = title_of(self.graph, buffer)
        reads, touches = buffer in task.reads, buffer in task.touches
        writes = buffer in task.writes
        joins = joins_touches(task, buffer) and bool(life.contents.touches)

        if (joins or writes) and life.recent_touches:
            pass  # the touches come after the holder, and this task after the touches
        elif life.is_empty:
            self.wait(Fault.NO_ALLOC_EDGE, [life.holder], node, f"the alloc of {name}")
        elif reads or touches:
            self.wait(Fault.NO_DATA_EDGE, [life.holder], node, f"the holder of {name}")
        else:
            self.wait(Fault.NO_ORDER_EDGE, [life.holder], node, f"the last writer of {name}")
        if joins:
            self.wait(Fault.NO_JOIN_EDGE, life.recent_touches, node, f"a touch of {name}")
        elif writes:
            self.wait(Fault.NO_ORDER_EDGE, life.recent_touches, node, f"a touch of old {name}")
        if writes or touches:
            self.wait(Fault.NO_ORDER_EDGE, life.recent_readers, node, f"a reader of old {name}")

        after = life.contents.after(task, buffer)
        if writes or joins:
            life.hold(node, after)
        life.contents = after
        life.users.append(node)
        if reads:
            life.readers.append(node)
            if life.holder != node:
                life.recent_readers.append(node)
        if touches:
            life.recent_touches.append(node)

    def _offload(self, node: Node) -> None:
        life = self._life(node)
        if life is None:
            return
        buffer, _ = _placed(node)
        if self._is_weight(buffer) and not self.is_published:
            self.wrong(Fault.WEIGHT_OFFLOADED, node.id, "copies a weight; the host has it already")
        if not life.contents.is_defined and not self.is_published:
            self.wrong(Fault.OFFLOAD_UNDEFINED, node.id, "copies bytes that nobody wrote")
        before = dict.fromkeys([*life.held_by(), *life.users])
        self.wait(Fault.NO_USE_OFFLOAD_EDGE, before, node.id, "a user")
        self._host_race(node.id, buffer)
        self.host[buffer] = life.contents
        self.host_source[buffer] = node.id
        self.host_users[buffer] = [node.id]
        self._vacate(node, life)

    def _host_race(self, node: int, buffer: int) -> None:
        """An offload must come after all that used its slot before: no edge here says so."""
        # See [Note: why direct edges are enough]: the one search, hardly ever more than a step.
        earlier = self.host_users.get(buffer, [])
        if not earlier:
            return
        missing = set(earlier)
        seen: set[int] = set()
        todo = [node]
        while todo and missing:
            for before in self.memgraph.predecessors[heappop(todo)]:
                if before >= earlier[0] and before not in seen:
                    seen.add(before)
                    missing.discard(before)
                    heappush(todo, before)
        for user in sorted(missing):
            title = self._title(self.memgraph.nodes[user])
            text = f"may overwrite the host copy before or while node {user} ({title}) uses it"
            self.wrong(Fault.HOST_RACE, node, text)

    def _drop(self, node: Node) -> None:
        life = self._life(node)
        if life is None:
            return
        buffer, _ = _placed(node)
        if (
            life.contents.is_defined
            and self.host.get(buffer) != life.contents
            and self._needed_later(buffer)
        ):
            self.wrong(Fault.CONTENTS_LOST, node.id, "is dirty and has a later use")
        before = dict.fromkeys([*life.held_by(), *life.readers, *life.recent_touches])
        self.wait(Fault.NO_READ_DROP_EDGE, before, node.id, "a user")
        self._vacate(node, life)

    def _vacate(self, node: Node, life: Life) -> None:
        buffer, _ = _placed(node)
        assert life.extent is not None
        self.bytes.free(life.extent, buffer, node.id)
        del self.lives[buffer]

    def _needed_later(self, buffer: int) -> bool:
        """True where the next use is not one that writes the whole buffer anew."""
        uses = self.uses[buffer]
        while uses and uses[-1].index in self.computed:
            uses.pop()
        return bool(uses) and (buffer in uses[-1].reads or buffer in uses[-1].touches)

    def _is_weight(self, buffer: int) -> bool:
        return self.graph.buffers[buffer].kind is BufferKind.WEIGHT

    _step: ClassVar[dict[NodeKind, Callable[[Walk, Node], None]]] = {
        NodeKind.RESIDENT: _at_start,
        NodeKind.STORED: _at_start,
        NodeKind.ALLOC: _alloc,
        NodeKind.RELOAD: _reload,
        NodeKind.COMPUTE: _compute,
        NodeKind.OFFLOAD: _offload,
        NodeKind.DROP: _drop,
    }


def _placed(node: Node) -> tuple[int, Extent]:
    """Buffer and extent of a node that has both."""
    assert node.buffer is not None
    assert node.extent is not None
    return node.buffer, node.extent


def _span(extent: Extent) -> str:
    return f"[{extent.offset}, {extent.end})"


def _saying(contents: Contents) -> str:
    if not contents.is_defined:
        return "nothing"
    writer = {None: "nothing", GIVEN: "given"}.get(contents.writer, f"task {contents.writer}'s")
    return writer + (f" touched by {sorted(contents.touches)}" if contents.touches else "")
