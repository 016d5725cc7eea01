"""Proof that a memgraph is right: reads plain data, finds everything that is wrong (floor 1).

Independent of whatever wrote the memgraph, and deliberately naive: it walks the nodes once in the
order of their ids, keeps what each byte and each buffer holds, and asks for every wait that makes
any other order of execution come out the same.

[Note: why direct edges are enough]
For each relation below the checker wants one edge between the two nodes themselves; a path would
do, but direct edges need no search. A buffer is *live* from its RESIDENT or ALLOC node to the DROP
or OFFLOAD that vacates its bytes. Within one life every task comes after the node that holds the
contents, and whatever changes the contents comes after whoever read the old ones; the vacator comes
after them all; the next tenant of a byte comes after the vacator of the latest one, and so, by
induction, after all tenants before. Two lives of a buffer share no byte of the arena unless a
memory edge orders them, so nothing else is asked between them. What they do share is the host
copy, for which alone a path is searched (``Fault.HOST_RACE``), because it hardly ever occurs.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import ClassVar

from ds_finepage.errors import InvalidPlanError
from ds_finepage.graph.memgraph import Extent, MemGraph, Node, NodeKind, Residency
from ds_finepage.graph.taskgraph import JOIN, BufferKind, Task, TaskGraph

_MAX_LISTED = 20  # violations that an error spells out


class Fault(str, enum.Enum):
    """Every way in which a memgraph can be wrong."""

    # The taskgraph and the shape of the memgraph. With one of these, nothing else is looked at.
    TASKGRAPH = "taskgraph"  # ids are not positions, or a task names its buffers badly
    WEIGHT_WRITTEN = "weight_written"  # a task writes or touches a weight
    ALIGNMENT = "alignment"  # not positive
    NODE_ID = "node_id"  # not the node's position
    NODE_FIELDS = "node_fields"  # a field is missing, superfluous or out of range
    EDGE_RANGE = "edge_range"  # names a node that does not exist
    EDGE_BACKWARD = "edge_backward"  # does not point to a higher id
    EDGE_UNSORTED = "edge_unsorted"
    EDGE_REPEATED = "edge_repeated"

    # Tasks.
    TASK_MISSING = "task_missing"  # no node computes it
    TASK_REPEATED = "task_repeated"  # more than one node does

    # Where buffers lie.
    NOT_PAGED = "not_paged"  # a node places a buffer that does not live in the arena
    EXTENT_OUTSIDE = "extent_outside"  # not inside the arena
    EXTENT_UNALIGNED = "extent_unaligned"
    EXTENT_TOO_SMALL = "extent_too_small"  # shorter than the buffer
    EXTENT_CHANGED = "extent_changed"  # not the one that the buffer was given
    OVERLAP = "overlap"  # bytes of a live buffer are given to another
    ALREADY_LIVE = "already_live"  # a second extent for a live buffer
    NOT_LIVE = "not_live"  # a task or a transfer needs a buffer that has no extent
    NOT_RELEASED = "not_released"  # live at the end, and not a weight
    ENTRY_MISMATCH = "entry_mismatch"  # ``entry`` and the RESIDENT nodes differ
    GATHER_KEPT = "gather_kept"  # rows that each call chooses anew are taken for resident
    EXIT_MISMATCH = "exit_mismatch"  # ``exit`` and the weights that are valid at the end differ

    # What buffers hold.
    UNDEFINED_READ = "undefined_read"  # read before anything was put there
    STALE_CONTENTS = "stale_contents"  # not the contents that program order gives
    UNJOINED_READ = "unjoined_read"  # touched, but no join between the touches and the use
    CONTENTS_LOST = "contents_lost"  # dropped, used again later, and no copy exists
    NO_HOST_COPY = "no_host_copy"  # reloaded, but the host has no valid copy
    RELOAD_OVERWRITES = "reload_overwrites"  # reloaded over contents that are already there
    OFFLOAD_UNDEFINED = "offload_undefined"  # nothing was put there yet
    WEIGHT_OFFLOADED = "weight_offloaded"  # a weight is clean: drop it
    STORED_WRONG = "stored_wrong"  # not a weight, repeated, or missing for a reload

    # Host memory.
    HOST_SLOT_MISSING = "host_slot_missing"  # an offloaded buffer has none, or more than one
    HOST_SLOT_OUTSIDE = "host_slot_outside"  # not inside ``host_bytes``
    HOST_SLOT_OVERLAP = "host_slot_overlap"
    HOST_RACE = "host_race"  # an offload may overwrite a copy too early, or be overwritten late

    # Waits. Any kind of edge between the two nodes will do: the kind only says why it is there.
    NO_DATA_EDGE = "no_data_edge"  # holder of the contents -> reader
    NO_ALLOC_EDGE = "no_alloc_edge"  # alloc -> first writer or reload
    NO_MEMORY_EDGE = "no_memory_edge"  # vacator -> alloc of the same bytes
    NO_READ_DROP_EDGE = "no_read_drop_edge"  # every reader, and the holder -> drop
    NO_USE_OFFLOAD_EDGE = "no_use_offload_edge"  # every user, and the holder -> offload
    NO_STORE_RELOAD_EDGE = "no_store_reload_edge"  # offload or stored -> reload
    NO_JOIN_EDGE = "no_join_edge"  # every touch -> join
    NO_ORDER_EDGE = "no_order_edge"  # readers of the old contents, and their writer -> new writer


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that is wrong, and the node at which it shows."""

    fault: Fault
    node: int | None  # None: no single node
    message: str


def check(memgraph: MemGraph) -> MemGraph:
    """Return the memgraph if nothing is wrong with it.

    Raises:
        InvalidPlanError: Something is wrong; the message lists what.
    """
    found = violations(memgraph)
    if not found:
        return memgraph
    lines = [f"{v.fault.value}: {v.message}" for v in found[:_MAX_LISTED]]
    if len(found) > _MAX_LISTED:
        lines.append(f"and {len(found) - _MAX_LISTED} more")
    raise InvalidPlanError(
        f"memgraph of {memgraph.graph.name!r} (policy {memgraph.policy!r}) breaks "
        f"{len(found)} rule(s):\n  " + "\n  ".join(lines)
    )


def violations(memgraph: MemGraph) -> list[Violation]:
    """List everything that is wrong with a memgraph; empty if it is right.

    Where its shape is wrong (ids, fields, edges), only that is listed.
    """
    return _shape(memgraph) or _Walk(memgraph).run()


# --- shape -----------------------------------------------------------------------------------


def _shape(memgraph: MemGraph) -> list[Violation]:
    """What is wrong with ids, fields and edges, before asking what they mean."""
    found = _taskgraph_shape(memgraph.graph)
    if memgraph.alignment < 1:
        found.append(
            Violation(Fault.ALIGNMENT, None, f"alignment is {memgraph.alignment}; it must be >= 1")
        )
    found += _node_shape(memgraph)
    found += _edge_shape(memgraph)
    return found


def _taskgraph_shape(graph: TaskGraph) -> list[Violation]:
    found: list[Violation] = []

    def wrong(message: str) -> None:
        found.append(Violation(Fault.TASKGRAPH, None, message))

    for position, buffer in enumerate(graph.buffers):
        if buffer.id != position:
            wrong(f"buffer at position {position} has id {buffer.id}")
        if buffer.nbytes < 0:
            wrong(f"buffer {buffer.id} has {buffer.nbytes} bytes")
    for position, task in enumerate(graph.tasks):
        if task.index != position:
            wrong(f"task at position {position} has index {task.index}")
        for ids, changes in ((task.reads, False), (task.writes, True), (task.touches, True)):
            if list(ids) != sorted(set(ids)):
                wrong(f"{task.where}: buffers {ids} are not sorted or repeat")
            for b in ids:
                if not 0 <= b < len(graph.buffers):
                    wrong(f"{task.where}: buffer {b} is outside 0..{len(graph.buffers) - 1}")
                elif changes and graph.buffers[b].kind is BufferKind.WEIGHT:
                    text = f"{task.where} changes {_name(graph, b)}; weights are read-only"
                    found.append(Violation(Fault.WEIGHT_WRITTEN, None, text))
    return found


def _node_shape(memgraph: MemGraph) -> list[Violation]:
    found: list[Violation] = []
    num_buffers, num_tasks = len(memgraph.graph.buffers), len(memgraph.graph.tasks)
    for position, node in enumerate(memgraph.nodes):
        if node.id != position:
            text = f"node at position {position} has id {node.id}"
            found.append(Violation(Fault.NODE_ID, position, text))
        computes = node.kind is NodeKind.COMPUTE
        has_extent = not computes and node.kind is not NodeKind.STORED
        for what, is_set, wanted in (
            ("task", node.task is not None, computes),
            ("buffer", node.buffer is not None, not computes),
            ("extent", node.extent is not None, has_extent),
        ):
            if is_set != wanted:
                text = f"node {position} ({node.kind.value}) {'lacks' if wanted else 'has'} {what}"
                found.append(Violation(Fault.NODE_FIELDS, position, text))
        if node.task is not None and not 0 <= node.task < num_tasks:
            text = f"node {position}: task {node.task} is outside 0..{num_tasks - 1}"
            found.append(Violation(Fault.NODE_FIELDS, position, text))
        if node.buffer is not None and not 0 <= node.buffer < num_buffers:
            text = f"node {position}: buffer {node.buffer} is outside 0..{num_buffers - 1}"
            found.append(Violation(Fault.NODE_FIELDS, position, text))
    return found


def _edge_shape(memgraph: MemGraph) -> list[Violation]:
    found: list[Violation] = []
    previous = None
    for edge in memgraph.edges:
        text = f"edge {edge.before} -> {edge.after} ({edge.kind.value})"
        if not (0 <= edge.before < len(memgraph.nodes) and 0 <= edge.after < len(memgraph.nodes)):
            text += f" names a node outside 0..{len(memgraph.nodes) - 1}"
            found.append(Violation(Fault.EDGE_RANGE, None, text))
        elif edge.before >= edge.after:
            text += " does not point forward"
            found.append(Violation(Fault.EDGE_BACKWARD, edge.after, text))
        if previous is not None and edge == previous:
            found.append(Violation(Fault.EDGE_REPEATED, edge.after, text + " is there twice"))
        elif previous is not None and edge < previous:
            found.append(Violation(Fault.EDGE_UNSORTED, edge.after, text + " is out of order"))
        previous = edge
    return found


def _name(graph: TaskGraph, buffer: int) -> str:
    """A buffer as a message names it."""
    b = graph.buffers[buffer]
    return f"{b.kind.value} {buffer}" + (f" ({b.name})" if b.name else "")


# --- contents --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Contents:
    """What a buffer holds: the last task that wrote all of it, and the touches since.

    A task stands for the value that it writes, so two contents are equal where the bytes are.
    """

    writer: int | None  # None: nobody; _GIVEN: there before the pass
    touches: frozenset[int] = frozenset()

    @property
    def is_defined(self) -> bool:
        return self.writer is not None or bool(self.touches)

    def after(self, task: Task, buffer: int) -> _Contents:
        """The contents when a task is done with them."""
        contents = self
        if buffer in task.writes or (_joins(task, buffer) and self.touches):
            contents = _Contents(task.index)
        if buffer in task.touches:
            contents = _Contents(contents.writer, contents.touches | {task.index})
        return contents


_GIVEN = -1
_UNDEFINED = _Contents(None)
_INITIAL = _Contents(_GIVEN)


def _joins(task: Task, buffer: int) -> bool:
    return task.op == JOIN and buffer in task.reads


def _contents_at_start(graph: TaskGraph) -> list[_Contents]:
    made_in_pass = (BufferKind.ACTIVATION, BufferKind.OUTPUT)
    return [_UNDEFINED if b.kind in made_in_pass else _INITIAL for b in graph.buffers]


def _program_order(graph: TaskGraph) -> tuple[list[dict[int, _Contents]], list[_Contents]]:
    """What each task finds in each of its buffers if tasks run in program order; what is left."""
    holds = _contents_at_start(graph)
    found: list[dict[int, _Contents]] = []
    for task in graph.tasks:
        found.append({b: holds[b] for b in task.buffers})
        for b in task.buffers:
            holds[b] = holds[b].after(task, b)
    return found, holds


# --- bytes -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Segment:
    """Neighbouring bytes with one history."""

    start: int
    tenant: int | None  # buffer that lies here or was the last to do so; None: nobody yet
    vacator: int | None  # node that freed the bytes; None: nobody yet, or the tenant is live


class _Bytes:
    """Who had each byte of the arena last. An interval map: sorted segments without gaps."""

    def __init__(self) -> None:
        self._segments = [_Segment(0, None, None)]  # the last one never ends

    def _range(self, extent: Extent) -> slice:
        """The segments that make up an extent, which are cut at its borders."""
        cuts = []
        for offset in (extent.offset, extent.end):
            at = bisect_left(self._segments, offset, key=lambda s: s.start)
            if at == len(self._segments) or self._segments[at].start != offset:
                old = self._segments[at - 1]
                self._segments.insert(at, _Segment(offset, old.tenant, old.vacator))
            cuts.append(at)
        return slice(*cuts)

    def take(self, extent: Extent, tenant: int) -> list[_Segment]:
        """Give bytes to a tenant; return the segments that were there."""
        where = self._range(extent)
        old = self._segments[where]
        if old:
            self._segments[where] = [_Segment(extent.offset, tenant, None)]
        return old

    def free(self, extent: Extent, tenant: int, vacator: int) -> None:
        """Note who vacates the bytes that a tenant has."""
        for segment in self._segments[self._range(extent)]:
            if segment.tenant == tenant and segment.vacator is None:
                segment.vacator = vacator


# --- the walk --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Life:
    """A buffer from the moment it gets its bytes until it gives them back."""

    contents: _Contents
    holder: int | None  # node that put the contents there; None: outside the pass
    extent: Extent | None = None  # None: not in the arena
    is_empty: bool = False  # the holder is an ALLOC
    readers: list[int] = field(default_factory=list)  # tasks, all
    users: list[int] = field(default_factory=list)  # tasks, all, whatever they do
    recent_readers: list[int] = field(default_factory=list)  # since the holder
    recent_touches: list[int] = field(default_factory=list)  # since the holder

    def held_by(self) -> list[int | None]:
        """The holder, unless it is an ALLOC with touches behind it: they wait for it."""
        return [] if self.is_empty and self.recent_touches else [self.holder]

    def hold(self, node: int, contents: _Contents) -> None:
        """Let a node be the holder."""
        self.holder, self.contents, self.is_empty = node, contents, False
        self.recent_readers, self.recent_touches = [], []


class _Walk:
    """One walk over the nodes of a well-shaped memgraph."""

    def __init__(self, memgraph: MemGraph) -> None:
        graph = memgraph.graph
        self.memgraph = memgraph
        self.graph = graph
        self.is_published = memgraph.policy.startswith("published")
        self.found: list[Violation] = []
        self.edges = {(e.before, e.after) for e in memgraph.edges}
        self.expected, self.final = _program_order(graph)
        self.latest = _contents_at_start(graph)  # newest contents of each buffer, wherever they are
        self.uses: list[list[Task]] = [[] for _ in graph.buffers]  # in program order, last first
        for task in reversed(graph.tasks):
            for b in task.buffers:
                self.uses[b].append(task)
        self.computed: set[int] = set()

        self.bytes = _Bytes()
        self.lives = {
            b.id: _Life(self.latest[b.id], None) for b in graph.buffers if not b.kind.is_paged
        }
        self.host = {  # contents of the host copies
            b.id: _INITIAL for b in graph.buffers if b.kind is BufferKind.WEIGHT
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
        return f"{node.kind.value} {_name(self.graph, node.buffer)}"

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
                self.wrong(Fault.GATHER_KEPT, node.id, "holds rows that the last call chose")
            if buffer in self.lives:
                self.wrong(Fault.ALREADY_LIVE, node.id, "is resident twice")
                continue
            for segment in self.bytes.take(extent, buffer):
                if segment.tenant is not None:
                    other = _name(self.graph, segment.tenant)
                    self.wrong(Fault.OVERLAP, node.id, f"at {_span(extent)} overlaps {other}")
            self.lives[buffer] = _Life(_INITIAL, node.id, extent)
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
            name = _name(self.graph, buffer)
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
                name = _name(self.graph, r.buffer) if known else f"buffer {r.buffer}"
                self.wrong(fault, None, f"{what} " + text.format(name, _span(r.extent)))

    def _host_slots(self) -> None:
        slots = Counter(b for b, _ in self.memgraph.host_slots)
        offloaded = {n.buffer for n in self.memgraph.nodes if n.kind is NodeKind.OFFLOAD}
        for buffer in self.graph.buffers:
            if slots[buffer.id] > 1 or (slots[buffer.id] == 0 and buffer.id in offloaded):
                name = _name(self.graph, buffer.id)
                text = f"{name} has {slots[buffer.id]} host slots; it needs 1"
                self.wrong(Fault.HOST_SLOT_MISSING, None, text)
        end = 0
        for b, offset in sorted(self.memgraph.host_slots, key=lambda s: (s[1], s[0])):
            if not 0 <= b < len(self.graph.buffers):
                text = f"a host slot is for buffer {b}, which does not exist"
                self.wrong(Fault.HOST_SLOT_MISSING, None, text)
                continue
            slot = Extent(offset, self.graph.buffers[b].nbytes)
            text = f"host slot {_span(slot)} of {_name(self.graph, b)} "
            if offset < 0 or slot.end > self.memgraph.host_bytes:
                text += f"is not inside {self.memgraph.host_bytes} bytes"
                self.wrong(Fault.HOST_SLOT_OUTSIDE, None, text)
            elif offset < end:
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

    def _life(self, node: Node) -> _Life | None:
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
                other = _name(self.graph, segment.tenant)
                self.wrong(Fault.OVERLAP, node.id, f"at {_span(extent)} overlaps live {other}")
        self.wait(Fault.NO_MEMORY_EDGE, vacators, node.id, "the vacator of its bytes")
        self.lives[buffer] = _Life(_UNDEFINED, node.id, extent, is_empty=True)

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
        if buffer in self.host_users:
            self.host_users[buffer].append(node.id)
        life.hold(node.id, self.host.get(buffer, _UNDEFINED))

    def _compute(self, node: Node) -> None:
        assert node.task is not None
        task = self.graph.tasks[node.task]
        for buffer in task.buffers:
            life = self.lives.get(buffer)
            if life is None:
                name = _name(self.graph, buffer)
                self.wrong(Fault.NOT_LIVE, node.id, f"needs {name}, which is not in the arena")
                self.latest[buffer] = self.latest[buffer].after(task, buffer)
                continue
            self._finds(node.id, task, buffer, life.contents)
            self._use(node.id, task, buffer, life)
            self.latest[buffer] = life.contents
        self.computed.add(task.index)

    def _finds(self, node: int, task: Task, buffer: int, contents: _Contents) -> None:
        """What a task finds in a buffer must be what it finds in program order."""
        expected = self.expected[task.index][buffer]
        name = _name(self.graph, buffer)
        if buffer in task.reads:
            if not contents.is_defined:
                self.wrong(Fault.UNDEFINED_READ, node, f"reads {name}, which holds nothing yet")
            elif contents.touches and not _joins(task, buffer):
                text = f"reads {name}, which was touched and not joined"
                self.wrong(Fault.UNJOINED_READ, node, text)
            elif contents != expected:
                text = f"reads {name} as {_saying(contents)}; it should be {_saying(expected)}"
                self.wrong(Fault.STALE_CONTENTS, node, text)
        elif buffer in task.touches and contents.writer != expected.writer:
            text = f"touches {name} as {_saying(contents)}; it should be {_saying(expected)}"
            self.wrong(Fault.STALE_CONTENTS, node, text)

    def _use(self, node: int, task: Task, buffer: int, life: _Life) -> None:
        """Ask for the waits of a task on one of its buffers; then let it have its effect."""
        name = _name(self.graph, buffer)
        reads, touches = buffer in task.reads, buffer in task.touches
        writes = buffer in task.writes
        joins = _joins(task, buffer) and bool(life.contents.touches)

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

    def _vacate(self, node: Node, life: _Life) -> None:
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

    _step: ClassVar[dict[NodeKind, Callable[[_Walk, Node], None]]] = {
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


def _saying(contents: _Contents) -> str:
    if not contents.is_defined:
        return "nothing"
    writer = {None: "nothing", _GIVEN: "given"}.get(contents.writer, f"task {contents.writer}'s")
    return writer + (f" touched by {sorted(contents.touches)}" if contents.touches else "")
