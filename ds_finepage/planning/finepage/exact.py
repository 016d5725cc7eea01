"""Plans tiny passes with the fewest moved bytes, by dynamic programming.

For a pass of a few tasks, this tries all sets of buffers that may be resident during each task. The
cheapest sequence of sets that ends as it began gives the stays of each buffer, which are then
placed offline. If no layout of the cheapest sequence is found, the next cheapest ones are tried.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, combinations

from ds_finepage.graph.memgraph import Extent, MemGraph, Residency
from ds_finepage.graph.taskgraph import BufferKind, Task, TaskGraph
from ds_finepage.planning.builder import MemGraphBuilder
from ds_finepage.planning.layout import Tenancy, first_fit
from ds_finepage.planning.problem import Problem

MAX_TASKS = 8
MAX_BUFFERS = 14
MAX_WEIGHTS = 6
NUM_PATHS = 12
NUM_SEQUENCES = 400
"""Ways to the same residency, and whole sequences, that are tried at most."""

NUM_LAYOUTS = 200
"""Orders in which the placement of a set of stays is tried at most."""

Resident = frozenset[int]


@dataclass
class _Stay:
    """A buffer in one extent, during some tasks.

    ``wraps``: a weight that has this extent when the pass begins, and again when it ends.
    """

    buffer: int
    tasks: list[int] = field(default_factory=list)
    wraps: bool = False


def is_tiny(graph: TaskGraph) -> bool:
    """Tell whether a pass is small enough to try all residencies."""
    found = graph.uses
    paged = [b for b in graph.buffers if found[b.id] and b.kind.is_paged]
    weights = [b for b in paged if b.kind is BufferKind.WEIGHT]
    return (
        len(graph.tasks) <= MAX_TASKS
        and len(paged) <= MAX_BUFFERS
        and len(weights) <= MAX_WEIGHTS
        and not any(t.touches for t in graph.tasks)
        and not any(b.gather is not None for b in weights)
    )


def plan_exact(problem: Problem) -> MemGraph | None:
    """Plan a tiny pass with the fewest moved bytes; None if no layout was found."""
    search = _ExactSearch(problem)
    for num_paths in (1, NUM_PATHS):
        for entry, sequence in search.cheapest(num_paths):
            placed = search.lay_out(_stays_of(entry, sequence))
            if placed is not None:
                return search.write(placed)
    return None


class _ExactSearch:
    """Finds the cheapest sequences of resident sets, and lays them out."""

    def __init__(self, problem: Problem) -> None:
        graph = problem.graph
        self._graph, self._alignment = graph, problem.alignment
        self._arena_bytes = problem.arena_bytes
        self._sizes = [problem.size(b.id) for b in graph.buffers]
        found = graph.uses
        self._last_use = [u[-1] if u else -1 for u in found]
        self._weights = frozenset(
            b.id for b in graph.buffers if b.kind is BufferKind.WEIGHT and found[b.id]
        )
        self._needed_later = [
            [self._is_needed(b.id, t.index, found[b.id]) for b in graph.buffers]
            for t in graph.tasks
        ]

    def size(self, buffers: Resident) -> int:
        return sum(self._sizes[b] for b in buffers)

    def _is_needed(self, buffer: int, task: int, found: Sequence[int]) -> bool:
        """Tell whether the contents that a buffer has after a task are read again."""
        later = [u for u in found if u > task]
        return bool(later) and buffer in self._graph.tasks[later[0]].reads

    def cheapest(self, num_paths: int) -> list[tuple[Resident, tuple[Resident, ...]]]:
        """List the cheapest residencies, at entry and during each task.

        Args:
            num_paths: Ways to the same residency that are followed at most.

        Returns:
            The cheapest first; with one path, it alone.
        """
        found = [
            (cost, index, entry, path)
            for index, entry in enumerate(_subsets(self._weights))
            if self.size(entry) <= self._arena_bytes
            for cost, path in self._paths_from(entry, num_paths)
        ]
        found.sort(key=lambda f: f[:2])
        most = 1 if num_paths == 1 else NUM_SEQUENCES
        return [(entry, path) for _, _, entry, path in found[:most]]

    def _paths_from(
        self, entry: Resident, num_paths: int
    ) -> list[tuple[int, tuple[Resident, ...]]]:
        # (residents after a task, those with a host copy) -> bytes moved, and the path
        reached: dict[tuple[Resident, Resident], list[tuple[int, tuple[Resident, ...]]]] = {
            (entry, frozenset()): [(0, ())]
        }
        for task in self._graph.tasks:
            following: dict[tuple[Resident, Resident], list[tuple[int, tuple[Resident, ...]]]] = {}
            for (resident, copied), paths in reached.items():
                for state, during, cost in self._steps(resident, copied, task):
                    following.setdefault(state, []).extend(
                        (moved + cost, (*path, during)) for moved, path in paths
                    )
            reached = {
                state: heapq.nsmallest(num_paths, paths, key=lambda p: p[0])
                for state, paths in following.items()
            }
        return [p for (resident, _), paths in reached.items() if resident >= entry for p in paths]

    def _steps(
        self, resident: Resident, copied: Resident, task: Task
    ) -> Iterator[tuple[tuple[Resident, Resident], Resident, int]]:
        """Yield the choices for a task: the state after it, the residents during it, the cost."""
        named = frozenset(self._graph.paged(task))
        missing = named.intersection(task.reads) - resident
        reloaded = sum(self._graph.buffers[b].nbytes for b in missing)
        for kept in _subsets(resident - named):
            during = kept | named
            if self.size(during) > self._arena_bytes:
                continue
            cost, clean = self._leave(resident - during, copied, task.index, reloaded)
            after = frozenset(
                b for b in during if b in self._weights or self._last_use[b] > task.index
            )
            yield (after, clean - frozenset(task.writes)), during, cost

    def _leave(
        self, gone: Resident, copied: Resident, task: int, moved: int
    ) -> tuple[int, Resident]:
        """Add the bytes to offload when buffers leave before a task."""
        for buffer in gone - self._weights - copied:
            if self._needed_later[task - 1][buffer]:
                moved += self._graph.buffers[buffer].nbytes
                copied |= {buffer}
        return moved, copied

    def lay_out(self, stays: list[_Stay]) -> list[tuple[_Stay, Extent]] | None:
        """Place stays; None if they fit in no order that was tried."""
        order = sorted(stays, key=lambda s: (-self._sizes[s.buffer], s.tasks[0], s.buffer))
        rng = random.Random(0)
        for _ in range(NUM_LAYOUTS):
            placed = first_fit((self._sizes[s.buffer], s.tasks) for s in order)
            if max((e.end for e in placed), default=0) <= self._arena_bytes:
                return list(zip(order, placed, strict=True))
            rng.shuffle(order)
        return None

    def write(self, placed: list[tuple[_Stay, Extent]]) -> MemGraph:
        """Write the memgraph of placed stays."""
        graph = self._graph
        builder = MemGraphBuilder(graph, "finepage", self._arena_bytes, self._alignment)
        tenancy = Tenancy()
        at_entry = [(s, e) for s, e in placed if s.wraps]
        builder.begin(
            tuple(Residency(s.buffer, e) for s, e in sorted(at_entry, key=lambda p: p[0].buffer))
        )
        during: list[dict[int, Extent]] = [{} for _ in graph.tasks]
        for stay, extent in placed:
            for index in stay.tasks:
                during[index][stay.buffer] = extent
        resident = {s.buffer: e for s, e in at_entry}
        for task in graph.tasks:
            wanted = during[task.index]
            for buffer in [b for b, e in resident.items() if wanted.get(b) != e]:
                extent = resident.pop(buffer)
                needed = task.index > 0 and self._needed_later[task.index - 1][buffer]
                tenancy.free(extent, builder.evict(buffer, is_needed=needed))
            for buffer in sorted(wanted.keys() - resident.keys()):
                builder.alloc(buffer, wanted[buffer], tenancy.vacators(wanted[buffer]))
                resident[buffer] = wanted[buffer]
                if buffer in task.reads:
                    builder.reload(buffer)
            builder.compute(task)
            for buffer in graph.paged(task):
                if buffer not in self._weights and self._last_use[buffer] == task.index:
                    tenancy.free(resident.pop(buffer), builder.drop(buffer))
        kept = {s.buffer: e for s, e in at_entry}
        for buffer in [b for b, e in resident.items() if kept.get(b) != e]:
            builder.drop(buffer)
        return builder.finish()


def _stays_of(entry: Resident, sequence: Sequence[Resident]) -> list[_Stay]:
    """Turn a sequence of resident sets into stays."""
    stays: list[_Stay] = []
    for buffer in sorted(frozenset().union(*sequence)):
        runs: list[_Stay] = []
        for task, during in enumerate(sequence):
            if buffer not in during:
                continue
            if runs and runs[-1].tasks[-1] == task - 1:
                runs[-1].tasks.append(task)
            else:
                runs.append(_Stay(buffer, [task]))
        if buffer in entry:
            _join_over_the_end(runs, len(sequence))
        stays += runs
    return stays


def _join_over_the_end(runs: list[_Stay], num_tasks: int) -> None:
    """Join the first and the last stay of the pass into one stay in one extent."""
    first = runs[0]
    if first.tasks[0] != 0:
        # It leaves before the first task runs, so nothing was won.
        return
    first.wraps = True
    if len(runs) > 1:
        last = runs.pop()
        first.tasks += last.tasks


def _subsets(items: Resident) -> Iterator[Resident]:
    ordered = sorted(items)
    every = chain.from_iterable(combinations(ordered, n) for n in range(len(ordered) + 1))
    return map(frozenset, every)
