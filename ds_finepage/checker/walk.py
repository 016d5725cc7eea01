"""The checker's walk over the nodes of a memgraph; see the note in checker.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

from ds_finepage.checker.arena import Arena
from ds_finepage.checker.faults import Fault, Violation
from ds_finepage.checker.host import HostCopies
from ds_finepage.checker.report import Report, placed, span
from ds_finepage.checker.shape import title_of
from ds_finepage.checker.state import (
    GIVEN,
    INITIAL,
    UNDEFINED,
    Contents,
    Life,
    contents_at_start,
    joins_touches,
    program_order,
)
from ds_finepage.graph.memgraph import MemGraph, Node, NodeKind, Residency
from ds_finepage.graph.taskgraph import BufferKind, Task

# --- one task: the contents it finds, and the waits that protect them ---------------------------


def require_contents(
    report: Report, node: int, task: Task, buffer: int, found: Contents, expected: Contents
) -> None:
    """Require that a task finds the contents in a buffer that program order gives it.

    ``found`` are those at this point of the walk, ``expected`` those of program order.
    """
    name = title_of(report.memgraph.graph, buffer)
    if buffer in task.reads:
        if not found.is_defined:
            text = f"reads {name}, which holds nothing yet"
            report.wrong(Fault.UNDEFINED_READ, node, text)
        elif found.touches and not joins_touches(task, buffer):
            text = f"reads {name}, which was touched and not joined"
            report.wrong(Fault.UNJOINED_READ, node, text)
        elif found != expected:
            text = f"reads {name} as {_saying(found)}; it should be {_saying(expected)}"
            report.wrong(Fault.STALE_CONTENTS, node, text)
    elif buffer in task.touches and found.writer != expected.writer:
        text = f"touches {name} as {_saying(found)}; it should be {_saying(expected)}"
        report.wrong(Fault.STALE_CONTENTS, node, text)


def use(report: Report, node: int, task: Task, buffer: int, life: Life) -> None:
    """Require the waits of a task on one of its buffers, and then apply its effect."""
    name = title_of(report.memgraph.graph, buffer)
    reads, touches = buffer in task.reads, buffer in task.touches
    writes = buffer in task.writes
    joins = joins_touches(task, buffer) and bool(life.contents.touches)

    wait = report.require_waits
    if (joins or writes) and life.recent_touches:
        pass  # the touches come after the holder, and this task after the touches
    elif life.is_empty:
        wait(Fault.NO_ALLOC_EDGE, [life.holder], node, f"the alloc of {name}")
    elif reads or touches:
        wait(Fault.NO_DATA_EDGE, [life.holder], node, f"the holder of {name}")
    else:
        wait(Fault.NO_ORDER_EDGE, [life.holder], node, f"the last writer of {name}")
    if joins:
        wait(Fault.NO_JOIN_EDGE, life.recent_touches, node, f"a touch of {name}")
    elif writes:
        wait(Fault.NO_ORDER_EDGE, life.recent_touches, node, f"a touch of old {name}")
    if writes or touches:
        wait(Fault.NO_ORDER_EDGE, life.recent_readers, node, f"a reader of old {name}")

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


def _saying(contents: Contents) -> str:
    if not contents.is_defined:
        return "nothing"
    writer = {None: "nothing", GIVEN: "given"}.get(contents.writer, f"task {contents.writer}'s")
    return writer + (f" touched by {sorted(contents.touches)}" if contents.touches else "")


# --- the walk --------------------------------------------------------------------------------


class Walk:
    """One walk over the nodes of a well-shaped memgraph."""

    def __init__(self, memgraph: MemGraph) -> None:
        graph = memgraph.graph
        self.memgraph = memgraph
        self.graph = graph
        self.report = Report(memgraph)
        self.arena = Arena(self.report)
        self.host = HostCopies(self.report)
        self.routed = set(memgraph.routed)
        self.kept = {r.buffer for r in memgraph.exit}
        self.expected, self.final = program_order(graph)
        self.latest = contents_at_start(graph)  # newest contents of each buffer, wherever they are
        self.uses: list[list[Task]] = [[] for _ in graph.buffers]  # in program order, last first
        for task in reversed(graph.tasks):
            for b in task.buffers:
                self.uses[b].append(task)
        self.computed: set[int] = set()
        self.lives = {
            b.id: Life(self.latest[b.id], None) for b in graph.buffers if not b.kind.is_paged
        }
        self.collected_by: dict[int, Contents] = {}  # reload of a part -> the whole contents

    def run(self) -> list[Violation]:
        """Find everything that is wrong."""
        self._tasks_once()
        self._entry()
        for node in self.memgraph.nodes:  # RESIDENT nodes are verified by now
            if node.kind is NodeKind.ALLOC:
                self._alloc(node)
            elif node.kind is NodeKind.COMPUTE:
                self._compute(node)
            elif node.kind in self._in_life and (life := self._life(node)) is not None:
                self._in_life[node.kind](self, node, life)
        self.host.end()
        self._exit()
        return self.report.found

    # -- before and after the walk

    def _tasks_once(self) -> None:
        times = Counter(n.task for n in self.memgraph.nodes if n.task is not None)
        for task in self.graph.tasks:
            if times[task.index] == 0:
                self.report.wrong(Fault.TASK_MISSING, None, f"{task.where} is not computed")
            elif times[task.index] > 1:
                text = f"{task.where} is computed {times[task.index]} times"
                self.report.wrong(Fault.TASK_REPEATED, None, text)

    def _entry(self) -> None:
        """Take the RESIDENT nodes: they hold from the start, wherever they are in the list."""
        wrong = self.report.wrong
        resident: list[Residency] = []
        for node in self.memgraph.nodes:
            if node.kind is not NodeKind.RESIDENT:
                continue
            buffer, extent = placed(node)
            resident.append(Residency(buffer, extent))
            if not self.arena.accepts(node):
                continue
            if not self._is_weight(buffer):
                wrong(Fault.ENTRY_MISMATCH, node.id, "is not a weight")
            elif not self.graph.can_be_kept(self.graph.buffers[buffer]):
                wrong(Fault.GATHER_KEPT, node.id, "holds the rows of the last call")
            if buffer in self.lives:
                wrong(Fault.ALREADY_LIVE, node.id, "is resident twice")
                continue
            self.arena.take(node)
            self.lives[buffer] = Life(INITIAL, node.id, extent)
        self._same_residency(Fault.ENTRY_MISMATCH, "entry", self.memgraph.entry, resident)

    def _exit(self) -> None:
        wrong = self.report.wrong
        resident: list[Residency] = []
        for buffer, life in sorted(self.lives.items()):
            name = title_of(self.graph, buffer)
            is_final = life.contents == self.final[buffer]
            if not is_final and (life.extent is None or life.contents.is_defined):
                text = f"{name} ends with other contents than program order gives it"
                wrong(Fault.STALE_CONTENTS, None, text)
            if life.extent is None:
                continue
            if not self._is_weight(buffer):
                wrong(Fault.NOT_RELEASED, life.holder, f"{name} is never dropped")
            elif life.contents.is_defined:
                resident.append(Residency(buffer, life.extent))
            else:
                text = f"{name} has bytes at the end, but nothing was put there"
                wrong(Fault.EXIT_MISMATCH, life.holder, text)
        self._same_residency(Fault.EXIT_MISMATCH, "exit", self.memgraph.exit, resident)

    def _same_residency(
        self, fault: Fault, field: str, listed: Sequence[Residency], true: Sequence[Residency]
    ) -> None:
        for difference, text in (
            (Counter(listed) - Counter(true), "lists {} at {}, but the nodes do not"),
            (Counter(true) - Counter(listed), "does not list {} at {}"),
        ):
            for r in difference:
                known = 0 <= r.buffer < len(self.graph.buffers)
                name = title_of(self.graph, r.buffer) if known else f"buffer {r.buffer}"
                self.report.wrong(fault, None, f"{field} " + text.format(name, span(r.extent)))

    # -- one node

    def _life(self, node: Node) -> Life | None:
        """Return the life that a RELOAD, COLLECT, OFFLOAD or DROP belongs to."""
        if not self.arena.accepts(node):
            return None
        buffer, extent = placed(node)
        life = self.lives.get(buffer)
        if life is None:
            text = "has no bytes in the arena at this point"
            self.report.wrong(Fault.NOT_LIVE, node.id, text)
        elif life.extent is not None and life.extent != extent:
            text = f"at {span(extent)} was given {span(life.extent)}"
            self.report.wrong(Fault.EXTENT_CHANGED, node.id, text)
        return life

    def _alloc(self, node: Node) -> None:
        if not self.arena.accepts(node):
            return
        buffer, extent = placed(node)
        if buffer in self.lives:
            self.report.wrong(Fault.ALREADY_LIVE, node.id, "has bytes in the arena already")
            return
        self.arena.take(node)
        self.lives[buffer] = Life(UNDEFINED, node.id, extent, is_empty=True)

    def _reload(self, node: Node, life: Life) -> None:
        buffer, _ = placed(node)
        if not life.is_empty or life.contents.is_defined:
            text = "is reloaded over what is already there"
            self.report.wrong(Fault.RELOAD_OVERWRITES, node.id, text)
        else:
            self.report.require_waits(Fault.NO_ALLOC_EDGE, [life.holder], node.id, "its alloc")
        contents = self.host.reload(node, self.latest[buffer])
        if buffer in self.routed:
            self._route(node)
        if self.graph.num_parts(self.graph.buffers[buffer]) > 1:
            self.collected_by[node.id] = contents
            contents = UNDEFINED  # the other ranks have the rest
        life.hold(node.id, contents)

    def _collect(self, node: Node, life: Life) -> None:
        contents = self.collected_by.get(-1 if life.holder is None else life.holder)
        if contents is None:
            self.report.wrong(Fault.COLLECT_WRONG, node.id, "follows no reload of this rank's part")
            return
        self.report.require_waits(Fault.NO_DATA_EDGE, [life.holder], node.id, "its reload")
        life.hold(node.id, contents)

    def _route(self, node: Node) -> None:
        """Verify a routed reload: it reads the table of slices that its task will find."""
        wrong = self.report.wrong
        route = self.memgraph.routed_reloads.get(node.id)
        if route is None:
            wrong(Fault.ROUTE_WRONG, node.id, "is routed, and nothing tells its slices")
            return
        if route.buffer in self.kept or route.task in self.computed:
            wrong(Fault.ROUTE_WRONG, node.id, "is of use to one task, and is kept for others")
        tells = self.graph.tensors[route.tensor].buffer
        life = self.lives.get(tells)
        name = title_of(self.graph, tells)
        if life is None or life.contents != self.expected[route.task][tells]:
            wrong(Fault.ROUTE_WRONG, node.id, f"finds other contents in {name} than its task")
            return
        self.report.require_waits(
            Fault.NO_DATA_EDGE, [life.holder], node.id, f"the holder of {name}"
        )
        life.users.append(node.id)
        life.readers.append(node.id)
        life.recent_readers.append(node.id)

    def _compute(self, node: Node) -> None:
        assert node.task is not None
        task = self.graph.tasks[node.task]
        for buffer in task.buffers:
            life = self.lives.get(buffer)
            if life is None:
                text = f"needs {title_of(self.graph, buffer)}, which is not in the arena"
                self.report.wrong(Fault.NOT_LIVE, node.id, text)
                self.latest[buffer] = self.latest[buffer].after(task, buffer)
                continue
            expected = self.expected[task.index][buffer]
            require_contents(self.report, node.id, task, buffer, life.contents, expected)
            use(self.report, node.id, task, buffer, life)
            self.latest[buffer] = life.contents
        self.computed.add(task.index)

    def _offload(self, node: Node, life: Life) -> None:
        before = dict.fromkeys([*life.held_by(), *life.users])
        self.report.require_waits(Fault.NO_USE_OFFLOAD_EDGE, before, node.id, "a user")
        self.host.offload(node, life.contents)
        self._vacate(node, life)

    def _drop(self, node: Node, life: Life) -> None:
        buffer, _ = placed(node)
        if (
            life.contents.is_defined
            and self.host.contents.get(buffer) != life.contents
            and self._is_needed_later(buffer)
        ):
            self.report.wrong(Fault.CONTENTS_LOST, node.id, "is dirty and has a later use")
        before = dict.fromkeys([*life.held_by(), *life.readers, *life.recent_touches])
        self.report.require_waits(Fault.NO_READ_DROP_EDGE, before, node.id, "a user")
        self._vacate(node, life)

    def _vacate(self, node: Node, life: Life) -> None:
        buffer, _ = placed(node)
        assert life.extent is not None
        self.arena.free(life.extent, node)
        del self.lives[buffer]

    def _is_needed_later(self, buffer: int) -> bool:
        """Tell whether the next use reads or touches the buffer, and so needs its contents."""
        uses = self.uses[buffer]
        while uses and uses[-1].index in self.computed:
            uses.pop()
        return bool(uses) and (buffer in uses[-1].reads or buffer in uses[-1].touches)

    def _is_weight(self, buffer: int) -> bool:
        return self.graph.buffers[buffer].kind is BufferKind.WEIGHT

    _in_life: ClassVar[dict[NodeKind, Callable[[Walk, Node, Life], None]]] = {
        NodeKind.RELOAD: _reload,
        NodeKind.COLLECT: _collect,
        NodeKind.OFFLOAD: _offload,
        NodeKind.DROP: _drop,
    }
