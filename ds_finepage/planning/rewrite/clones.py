"""Puts clones of tasks, which ``recompute`` chooses, into a taskgraph: TaskGraph -> TaskGraph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ds_finepage.graph.taskgraph import BufferKind, Ref, Task, TaskGraph


@dataclasses.dataclass(frozen=True, slots=True)
class Clone:
    """A buffer that is made again instead of being held.

    Attributes:
        buffer: The buffer.
        end: The next task that uses it; the clone runs just before.
        tasks: The tasks to run again, in order: the maker of the buffer, and the makers of the
            operands that are no longer live.
    """

    buffer: int
    end: int
    tasks: tuple[int, ...]


def insert_clones(graph: TaskGraph, clones: Sequence[Clone]) -> TaskGraph:
    """Run tasks again, each clone with buffers of its own that later tasks then use.

    If no task uses the result of a cloned task any more, that task is left out. Buffers and tensors
    keep their ids and new ones are appended, so inputs and outputs stay valid.

    Args:
        graph: The pass.
        clones: The clones; those before the same task run in this order.

    Returns:
        The taskgraph with the clones; ``graph`` itself if there are none.
    """
    if not clones:
        return graph
    before: dict[int, list[Clone]] = {}
    for clone in clones:
        before.setdefault(clone.end, []).append(clone)
    writer = _Writer(graph)
    for task in graph.tasks:
        for clone in before.get(task.index, ()):
            writer.clone(clone)
        writer.keep(task)
    return writer.finish({t for clone in clones for t in clone.tasks})


class _Writer:
    """Builds the new taskgraph; its tasks are numbered at the end.

    Invariant: ``_names`` maps every buffer that was made again to its latest copy.
    """

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        self._buffers = list(graph.buffers)
        self._tensors = list(graph.tensors)
        self._views: dict[tuple[int, int], int] = {}  # tensor, new buffer -> the new tensor
        self._names: dict[int, int] = {}
        self._tasks: list[Task] = []
        self._origins: list[int | None] = []  # of each task: its old index, None for clones

    def keep(self, task: Task) -> None:
        self._origins.append(task.index)
        self._tasks.append(self._renamed(task, self._names))

    def clone(self, clone: Clone) -> None:
        names = dict(self._names)
        for index in clone.tasks:
            task = self._graph.tasks[index]
            for buffer in task.writes:
                names[buffer] = len(self._buffers)
                new = dataclasses.replace(
                    self._graph.buffers[buffer], id=names[buffer], kind=BufferKind.ACTIVATION
                )
                self._buffers.append(new)
            self._origins.append(None)
            self._tasks.append(self._renamed(task, names))
        # Later tasks do not use the other buffers that the clone makes.
        self._names[clone.buffer] = names[clone.buffer]

    def _renamed(self, task: Task, names: Mapping[int, int]) -> Task:
        if names.keys().isdisjoint(task.buffers):
            return task
        return dataclasses.replace(
            task,
            args=self._renamed_refs(task.args, names),
            kwargs=self._renamed_refs(task.kwargs, names),
            results=tuple(None if r is None else self._tensor(r, names) for r in task.results),
            reads=tuple(sorted(names.get(b, b) for b in task.reads)),
            writes=tuple(sorted(names.get(b, b) for b in task.writes)),
        )

    def _renamed_refs(self, value: Any, names: Mapping[int, int]) -> Any:
        if isinstance(value, Ref):
            return Ref(self._tensor(value.tensor, names))
        if isinstance(value, tuple):
            return tuple(self._renamed_refs(v, names) for v in value)
        return value

    def _tensor(self, tensor: int, names: Mapping[int, int]) -> int:
        view = self._graph.tensors[tensor]
        if view.buffer not in names:
            return tensor
        key = (tensor, names[view.buffer])
        if key not in self._views:
            self._views[key] = len(self._tensors)
            self._tensors.append(dataclasses.replace(view, id=len(self._tensors), buffer=key[1]))
        return self._views[key]

    def finish(self, cloned: set[int]) -> TaskGraph:
        """Leave out those of the cloned tasks whose results no task uses."""
        needed: set[int] = set()
        kept: list[Task] = []
        for task, origin in zip(reversed(self._tasks), reversed(self._origins), strict=True):
            only_held = all(self._buffers[b].kind is BufferKind.ACTIVATION for b in task.writes)
            may_go = origin in cloned and only_held
            if not may_go or not needed.isdisjoint(task.writes):
                kept.append(task)
                needed.update(task.reads)
        return dataclasses.replace(
            self._graph,
            buffers=tuple(self._buffers),
            tensors=tuple(self._tensors),
            tasks=tuple(
                task if task.index == i else dataclasses.replace(task, index=i)
                for i, task in enumerate(reversed(kept))
            ),
            calls=(),  # their tasks have other indices now
        )
