"""The fewest bytes and the least time of any steady schedule of one batch, found another way.

Nothing here comes from the planner. A linear program decides, for each weight and each stretch
between two of its uses, the share that stays in the arena. It is generous to the schedule: shares
may be any fraction, bytes need not be contiguous, and only activations that a task names take room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scipy.optimize import linprog

from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import BufferKind, Task, TaskGraph

NS_PER_S = 10**9


@dataclass(frozen=True)
class Machine:
    """The time of each task, and the rate of the link."""

    tasks_ns: Sequence[int]
    h2d_bytes_per_s: float

    def copy_ns(self, nbytes: float) -> float:
        return nbytes * NS_PER_S / self.h2d_bytes_per_s


def device_bytes(graph: TaskGraph, arena_bytes: int, alignment: int) -> list[int]:
    """Return, for each task, the bytes beside its own workspace, in whole units."""
    most = arena_bytes + max((t.workspace_bytes for t in graph.tasks), default=0)
    return [-(-(most - t.workspace_bytes) // alignment) * alignment for t in graph.tasks]


def _paged(graph: TaskGraph, task: Task, kind: BufferKind) -> list[int]:
    named = {*task.reads, *task.writes, *task.touches}
    return [b for b in named if graph.buffers[b].kind is kind]


@dataclass(frozen=True)
class _Stretch:
    """A weight from one use to the next, which may be in the next pass."""

    weight: int
    nbytes: int
    needed: int  # bytes that a pass needs at the end of the stretch
    idle: frozenset[int]  # the tasks strictly in between
    ends: frozenset[int]  # the uses at both ends
    window: tuple[int, int] | None  # the router and the task of a routed weight
    may_stay: bool


def _stretches(graph: TaskGraph, *, cut: bool) -> Iterator[_Stretch]:
    known, num_tasks = routes(graph), len(graph.tasks)
    uses: dict[int, list[int]] = {}
    for task in graph.tasks:
        for b in _paged(graph, task, BufferKind.WEIGHT):
            uses.setdefault(b, []).append(task.index)
    for weight, indices in uses.items():
        buffer, route = graph.buffers[weight], known.get(weight)
        for begin, end in zip([indices[-1], *indices], indices, strict=False):
            steps = (end - begin - 1) % num_tasks if begin != end else num_tasks - 1
            needed = buffer.nbytes
            if route is not None:
                needed = buffer.nbytes // route.num_slices * route.most_used
            elif cut and graph.tasks[end].op == "aten.embedding.default":
                rows = sum(graph.buffers[b].nbytes for b in graph.tasks[end].writes)
                needed = min(rows, buffer.nbytes)
            yield _Stretch(
                weight=weight,
                nbytes=buffer.nbytes,
                needed=needed,
                idle=frozenset((begin + 1 + n) % num_tasks for n in range(steps)),
                ends=frozenset((begin, end)),
                window=None if route is None else (route.source, route.task),
                may_stay=buffer.gather is None,
            )


class _Program:
    """Rows of a linear program: the unknowns are at least 0, the rows at most their limits."""

    def __init__(self) -> None:
        self.most: list[float | None] = []
        self.rows: list[tuple[dict[int, float], float]] = []

    def unknown(self, most: float | None = None) -> int:
        self.most.append(most)
        return len(self.most) - 1

    def at_most(self, terms: dict[int, float], limit: float) -> None:
        self.rows.append((terms, limit))

    def least(self, goal: dict[int, float]) -> float | None:
        """Return the least value of a sum; None if nothing obeys all rows."""
        width = len(self.most)
        if not width:
            return 0.0 if all(limit >= 0 for _, limit in self.rows) else None

        def full(terms: dict[int, float]) -> list[float]:
            return [terms.get(n, 0.0) for n in range(width)]

        found = linprog(
            full(goal),
            A_ub=[full(terms) for terms, _ in self.rows] or None,
            b_ub=[limit for _, limit in self.rows] or None,
            bounds=[(0, most) for most in self.most],
            method="highs",
        )
        return float(found.fun) if found.status == 0 else None


def fewest_bytes(graph: TaskGraph, arena_bytes: int, alignment: int, *, cut: bool) -> float | None:
    """Return the fewest bytes that a pass reloads; None if some task has no room.

    Args:
        graph: The pass.
        arena_bytes: Size of the arena, beside which the largest workspace has room.
        alignment: Of extents, in bytes.
        cut: A task needs only a part of a weight at a time.
    """
    program = _Program()
    copied, _ = _copies(program, graph, device_bytes(graph, arena_bytes, alignment), alignment, cut)
    return program.least(copied)


def least_ns(
    graph: TaskGraph, arena_bytes: int, alignment: int, machine: Machine, *, cut: bool
) -> float | None:
    """Return the least time of a pass: for the link, and for tasks and routers in turn.

    Args:
        graph: The pass.
        arena_bytes: Size of the arena, beside which the largest workspace has room.
        alignment: Of extents, in bytes.
        machine: The machine.
        cut: A task needs only a part of a weight at a time.
    """
    program = _Program()
    room = device_bytes(graph, arena_bytes, alignment)
    copied, behind = _copies(program, graph, room, alignment, cut)
    time = program.unknown()
    copies = {n: machine.copy_ns(nbytes) for n, nbytes in copied.items()}
    program.at_most({**copies, time: -1.0}, 0.0)
    waits: dict[int, float] = {}
    outside = float(sum(machine.tasks_ns))
    for source in {source for source, _ in behind}:
        windows = [window for window in behind if window[0] == source]
        late = {n: machine.copy_ns(b) for window in windows for n, b in behind[window].items()}
        inside = sum(machine.tasks_ns[source + 1 : max(windows)[1]])
        outside -= inside
        wait = program.unknown()
        program.at_most({wait: -1.0}, -inside)
        program.at_most({**late, wait: -1.0}, 0.0)
        waits[wait] = 1.0
    program.at_most({**waits, time: -1.0}, -outside)
    return program.least({time: 1.0})


def _copies(
    program: _Program, graph: TaskGraph, room: list[int], alignment: int, cut: bool
) -> tuple[dict[int, float], dict[tuple[int, int], dict[int, float]]]:
    """Add what stays and what is copied.

    Returns:
        The bytes of all copies, and those of copies behind a router by (router, task).
    """
    copied: dict[int, float] = {}
    behind: dict[tuple[int, int], dict[int, float]] = {}
    stays: list[dict[int, float]] = [{} for _ in graph.tasks]
    at_use: dict[tuple[int, int], dict[int, int]] = {}
    for stretch in _stretches(graph, cut=cut):
        kept = program.unknown(1.0 if stretch.may_stay else 0.0)
        for task in stretch.idle:
            stays[task][kept] = float(stretch.nbytes)
        for task in stretch.ends:
            at_use.setdefault((task, stretch.weight), {})[kept] = stretch.nbytes
        ahead = program.unknown()
        copied[ahead] = float(stretch.nbytes if stretch.window else stretch.needed)
        ways = {kept: -1.0, ahead: -1.0}
        if stretch.window:
            late = program.unknown()
            ways[late] = -1.0
            copied[late] = float(stretch.needed)
            behind.setdefault(stretch.window, {})[late] = float(stretch.needed)
        program.at_most(ways, -1.0)
    if cut:  # at a use, at least the larger of the parts that stay before and after it
        for (task, _), parts in at_use.items():
            there = program.unknown(1.0)
            for kept in parts:
                program.at_most({kept: 1.0, there: -1.0}, 0.0)
            stays[task][there] = float(max(parts.values()))
    for task in graph.tasks:
        kinds = [BufferKind.ACTIVATION] if cut else [BufferKind.ACTIVATION, BufferKind.WEIGHT]
        named = [b for kind in kinds for b in _paged(graph, task, kind)]
        taken = sum(-(-graph.buffers[b].nbytes // alignment) * alignment for b in named)
        program.at_most(stays[task.index], room[task.index] - taken)
    return copied, behind
