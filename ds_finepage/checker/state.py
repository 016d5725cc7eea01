"""The contents of buffers, and their lives in the arena, during the checker's walk."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_finepage.graph.memgraph import Extent
from ds_finepage.graph.taskgraph import JOIN, BufferKind, Task, TaskGraph

# --- contents --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a buffer: the last task that wrote all of it, and the touches since then.

    A task stands for the value that it writes, so equal contents are equal bytes.
    """

    writer: int | None  # None: no task; GIVEN: valid before the pass
    touches: frozenset[int] = frozenset()

    @property
    def is_defined(self) -> bool:
        """Tell whether any task wrote the buffer, or it was valid before the pass."""
        return self.writer is not None or bool(self.touches)

    def after(self, task: Task, buffer: int) -> Contents:
        """Return the contents after a task."""
        contents = self
        if buffer in task.writes or (joins_touches(task, buffer) and self.touches):
            contents = Contents(task.index)
        if buffer in task.touches:
            contents = Contents(contents.writer, contents.touches | {task.index})
        return contents


GIVEN = -1
UNDEFINED = Contents(None)
INITIAL = Contents(GIVEN)


def joins_touches(task: Task, buffer: int) -> bool:
    """Tell whether a task joins the touches of a buffer."""
    return task.op == JOIN and buffer in task.reads


def contents_at_start(graph: TaskGraph) -> list[Contents]:
    """Return the contents of each buffer when the pass begins."""
    made_in_pass = (BufferKind.ACTIVATION, BufferKind.OUTPUT)
    return [UNDEFINED if b.kind in made_in_pass else INITIAL for b in graph.buffers]


def program_order(graph: TaskGraph) -> tuple[list[dict[int, Contents]], list[Contents]]:
    """Run the tasks in program order.

    Returns:
        For each task, the contents that it finds in each of its buffers; and the final contents of
        each buffer.
    """
    holds = contents_at_start(graph)
    found: list[dict[int, Contents]] = []
    for task in graph.tasks:
        found.append({b: holds[b] for b in task.buffers})
        for b in task.buffers:
            holds[b] = holds[b].after(task, b)
    return found, holds


# --- lives ------------------------------------------------------------------------------------


@dataclass(slots=True)
class Life:
    """A buffer from the node that gives it bytes to the node that vacates them."""

    contents: Contents
    holder: int | None  # node that made the contents; None: they come from outside the pass
    extent: Extent | None = None  # None: not in the arena
    is_empty: bool = False  # the holder is an ALLOC
    readers: list[int] = field(default_factory=list)  # tasks that read, all
    users: list[int] = field(default_factory=list)  # tasks, all
    recent_readers: list[int] = field(default_factory=list)  # since the holder
    recent_touches: list[int] = field(default_factory=list)  # since the holder

    def held_by(self) -> list[int | None]:
        """Return the holder; none for an ALLOC with touches, because the touches wait for it."""
        return [] if self.is_empty and self.recent_touches else [self.holder]

    def hold(self, node: int, contents: Contents) -> None:
        """Make a node the holder of new contents."""
        self.holder, self.contents, self.is_empty = node, contents, False
        self.recent_readers, self.recent_touches = [], []
