"""The checker's view of one task: the contents it finds, and the waits that protect them."""

from __future__ import annotations

from ds_finepage.checker.faults import Fault
from ds_finepage.checker.report import Report
from ds_finepage.checker.shape import title_of
from ds_finepage.checker.state import GIVEN, Contents, Life, joins_touches
from ds_finepage.graph.taskgraph import Task


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
