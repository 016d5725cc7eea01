"""The contents of buffers, and their lives in the arena, during the checker's walk."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_finepage.graph.memgraph import Extent
from ds_finepage.graph.taskgraph import JOIN, BufferKind, Task, TaskGraph

# --- contents --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Contents:
    """What a buffer holds: the last task that wrote all of it, and the touches since.

    A task stands for the value that it writes, so two contents are equal where the bytes are.
    """

    writer: int | None  # None: nobody; GIVEN: there before the pass
    touches: frozenset[int] = frozenset()

    @property
    def is_defined(self) -> bool:
        """Tell whether anything was ever put there."""
        return self.writer is not None or bool(self.touches)

    def after(self, task: Task, buffer: int) -> Contents:
        """The contents when a task is done with them."""
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
    """Return what each buffer holds when the pass begins."""
    made_in_pass = (BufferKind.ACTIVATION, BufferKind.OUTPUT)
    return [UNDEFINED if b.kind in made_in_pass else INITIAL for b in graph.buffers]


def program_order(graph: TaskGraph) -> tuple[list[dict[int, Contents]], list[Contents]]:
    """What each task finds in each of its buffers if tasks run in program order; what is left."""
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
    """A buffer from the moment it gets its bytes until it gives them back."""

    contents: Contents
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

    def hold(self, node: int, contents: Contents) -> None:
        """Let a node be the holder."""
        self.holder, self.contents, self.is_empty = node, contents, False
        self.recent_readers, self.recent_touches = [], []
