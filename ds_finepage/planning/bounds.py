"""Lower bounds on the bytes that a plan copies and on the time that it takes.

Computed from the taskgraph alone, by code that shares nothing with the policies.

The bounds hold for one batch at a time: a pass begins when the last one has ended, and its tasks
run in program order. Cheap tasks may run more than once. A block schedule, which takes several
batches through a layer before it reloads the next, can be faster per batch.

[Note: the proof of the bound]
The proof for whole weights holds even if they are kept by the byte:

1. Let ``kept[w]`` be the bytes of weight w that the pass does not reload. They are needed when
   w is used, so they are resident when the pass begins. They are resident again when it ends,
   without a reload, so they never leave the arena. Every other byte of a used weight is
   reloaded at least once. So the pass reloads at least ``used - sum(kept)``.
2. While a task runs, the arena holds *at one time* the buffers that the task names, and the
   kept bytes of all other weights. (Other live activations are not counted: they may be
   offloaded, or made again by running their tasks once more. A task that runs twice names as
   many bytes each time.) With ``spare`` the arena less the buffers that the task names::

       sum(kept) - sum(kept[w] for w that the task reads) <= spare         for every task

3. A task that reads weights therefore forces ``sum(kept) - spare`` bytes of *its* weights to be
   among the kept ones. Tasks that share no weight force different bytes, so for any family of
   such tasks::

       sum(max(0, sum(kept) - spare[t]) for t in family) <= sum(kept)

The largest ``sum(kept)`` that obeys 2 (if a task's weights are kept entirely) and 3 gives the
bound. For equal weights, each read once, farthest-next-use reaches it on a cycle. In general it
is a bound and not the optimum: it ignores fragmentation, offloads and indivisible buffers, and
it tries only one family, chosen greedily by ``spare``. Rows that each call brings in itself are
never kept.

If weights may be cut, conditions are weaker. A task needs its activations in the arena, but
perhaps only a few bytes of a weight at a time, packed or unpacked, and only the looked-up rows
of an embedding table. So at most ``arena - activations that one task names`` bytes of weights
are kept, and the others are reloaded. This holds for schedules that run tasks twice too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ds_finepage.graph.packed import PACKED_GROUPED
from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.graph.unpacking import unpacked_buffers
from ds_finepage.units import NS_PER_S, align_up

_EMBEDDING = "aten.embedding.default"


@dataclass(frozen=True, slots=True)
class _Part:
    """Weights that a pass uses.

    Attributes:
        nbytes: Their bytes, which a plan keeps or reloads.
        share: The share of a byte that a pass reloads at least if the byte is not kept. It is less
            than one for experts and for tables in which rows are looked up.
        is_routed: The pass itself chooses the share, so it cannot be reloaded ahead of that choice.
    """

    nbytes: int
    share: Fraction
    is_routed: bool = False

    def cost(self, link_weight: Fraction) -> Fraction:
        """Return the least cost of a byte that is not kept; see ``LowerBound.time_ns``."""
        return min(self.share, link_weight) if self.is_routed else self.share * link_weight


@dataclass(frozen=True, slots=True)
class LowerBound:
    """The least that a pass of one batch reloads.

    Attributes:
        graph: The pass.
        parts: The weights that can be kept.
        per_call_bytes: Bytes that each call brings in itself, so they cannot be kept.
        kept_bytes: The most bytes that a plan can keep from pass to pass.
        may_cut: Plans may cut weights, and the tasks that use them.
    """

    graph: TaskGraph
    parts: tuple[_Part, ...]
    per_call_bytes: int
    kept_bytes: int
    may_cut: bool = False

    @property
    def needed_bytes(self) -> int:
        """Bytes of the weights that every pass needs whole, kept or not."""
        whole = sum(p.nbytes for p in self.parts if p.share == 1 and not p.is_routed)
        return whole + self.per_call_bytes

    @property
    def nbytes(self) -> int:
        """The least bytes of all reloads of a pass.

        A routed weight (experts) counts as many slices as a pass uses at most. A pass whose tokens
        choose the same experts may reload fewer.
        """
        return int(self._cost(Fraction(1)))

    def time_ns(self, tasks_ns: Sequence[int], h2d_bytes_per_s: float) -> int:
        """Return the least time of a pass: of its tasks, of its reloads, or of both in turn.

        A pass without experts takes at least the time of its tasks, and at least that of its
        reloads. Experts add a condition, because a pass reloads a routed weight in one of two ways:

        - *ahead* of its router: all slices, while other tasks run;
        - *behind* its router: only the chosen slices, between the router and the task that uses
          them. In this window no task outside of it runs.

        So with ``outside`` the time of the tasks that run outside of all windows::

            time >= all reloads / link rate,    time >= outside + reloads behind / link rate

        The plan may choose the way, and the weights to keep. Any average of the two right sides is
        a bound, for the choice that makes this average least. A byte then costs the weight of the
        first side if it is reloaded ahead, and its chosen share if it is reloaded behind. The
        largest of these bounds is found where both ways cost the same.

        Args:
            tasks_ns: The time of each task.
            h2d_bytes_per_s: The rate of the link.
        """
        weights = {p.share for p in self.parts if p.is_routed}
        outside = _outside_windows(self.graph) if weights else []
        if self.may_cut:  # a slice of a product runs while the next one is reloaded
            outside = [t for t in outside if self.graph.tasks[t].op != PACKED_GROUPED]
        outside_ns = sum(tasks_ns[t] for t in outside)
        return max(
            sum(tasks_ns),
            *(
                int((1 - w) * outside_ns + _link_ns(self._cost(w), h2d_bytes_per_s))
                for w in {*weights, Fraction(1)}
            ),
        )

    def _cost(self, link_weight: Fraction) -> Fraction:
        """Return the least cost of all reloads, if the bytes that cost most are kept."""
        total, kept_bytes = self.per_call_bytes * link_weight, self.kept_bytes
        costs = ((part.cost(link_weight), part.nbytes) for part in self.parts)
        for cost, nbytes in sorted(costs, reverse=True):
            kept = min(kept_bytes, nbytes)
            kept_bytes -= kept
            total += cost * (nbytes - kept)
        return total


def lower_bound(
    graph: TaskGraph,
    arena_bytes: int,
    alignment: int,
    *,
    may_cut: bool,
    own_workspaces: bool = False,
) -> LowerBound:
    """Find the least that every steady pass of one batch reloads.

    *Steady* means that the pass is repeated and its exit residency is its entry residency. If some
    task does not fit into the arena there is no plan, and no byte is counted as kept. See
    [Note: the proof of the bound].

    Args:
        graph: The pass.
        arena_bytes: Size of the arena, beside which the largest workspace has room.
        alignment: Of extents, in bytes; the buffers that a task names count in whole units.
        may_cut: Weights may be cut at will.
        own_workspaces: Each task takes its own workspace only, and weights may use what it leaves
            of the largest one. No plan in such an arena does that, but a schedule under the same
            device budget could.
    """
    arenas = [align_up(arena_bytes, alignment)] * len(graph.tasks)
    if own_workspaces:
        most = arena_bytes + graph.workspace_bytes
        arenas = [align_up(most - t.workspace_bytes, alignment) for t in graph.tasks]
    # Where weights are cut, they can be unpacked as few bytes at a time as they are used.
    small = unpacked_buffers(graph) if may_cut else frozenset[int]()
    rooms = list(_rooms(graph, arenas, alignment, small))
    looked_up: dict[int, int] = {}
    needed: dict[int, int] = {}
    for task, room in zip(graph.tasks, rooms, strict=True):
        sizes = {b: graph.buffers[b].nbytes for b in room.weights}
        if may_cut and task.op == _EMBEDDING:
            rows = sum(graph.buffers[b].nbytes for b in task.writes)
            looked_up |= {b: max(looked_up.get(b, 0), min(n, rows)) for b, n in sizes.items()}
        else:
            needed |= sizes
    if may_cut:
        kept_bytes = min((room.beside_activations_bytes for room in rooms), default=0)
    else:
        kept_bytes = _most_kept_bytes(rooms, sum(needed.values()))
    return LowerBound(
        graph=graph,
        parts=_parts(graph, needed, {b: n for b, n in looked_up.items() if b not in needed}),
        per_call_bytes=sum(
            graph.buffers[b].nbytes for b in {b for room in rooms for b in room.per_call}
        ),
        kept_bytes=max(0, kept_bytes),
        may_cut=may_cut,
    )


def lower_bound_bytes(
    graph: TaskGraph, arena_bytes: int, alignment: int, *, may_cut: bool = False
) -> int:
    """Return the bytes that every steady pass has to reload at least; see :func:`lower_bound`."""
    return lower_bound(graph, arena_bytes, alignment, may_cut=may_cut).nbytes


def _link_ns(nbytes: Fraction, h2d_bytes_per_s: float) -> float:
    return float(nbytes * NS_PER_S) / h2d_bytes_per_s


# The bytes that can be kept.


@dataclass(frozen=True, slots=True)
class _Room:
    """The room that one task leaves to weights that it does not read."""

    spare_bytes: int  # the arena, less the buffers that the task names
    beside_activations_bytes: int  # the arena, less what it names beside these weights
    weights: dict[int, int]  # that it reads and that can be kept, with their bytes
    per_call: list[int]  # weights that it reads and that each call brings in

    @property
    def read_bytes(self) -> int:
        return sum(self.weights.values())


def _rooms(
    graph: TaskGraph, arenas: list[int], alignment: int, small: frozenset[int]
) -> Iterator[_Room]:
    """Yield the room beside each task, which has its own arena; ``small`` buffers take no bytes."""
    extents = [
        align_up(b.nbytes, alignment) if b.kind.is_paged and b.id not in small else 0
        for b in graph.buffers
    ]
    weights = {b.id: b.nbytes for b in graph.buffers if b.kind is BufferKind.WEIGHT}
    per_call = {b for b in weights if not graph.can_be_kept(graph.buffers[b])}
    for task, arena in zip(graph.tasks, arenas, strict=True):
        named = {*task.reads, *task.writes, *task.touches}
        kept = [b for b in named if b in weights and b not in per_call]
        spare_bytes = arena - sum([extents[b] for b in named])
        yield _Room(
            spare_bytes=spare_bytes,
            beside_activations_bytes=spare_bytes + sum([extents[b] for b in kept]),
            weights={b: weights[b] for b in kept},
            per_call=[b for b in named if b in per_call],
        )


def _parts(
    graph: TaskGraph, needed: dict[int, int], looked_up: dict[int, int]
) -> tuple[_Part, ...]:
    """Sum up weights by the share of them that a pass reloads at least.

    ``looked_up`` has the bytes of rows, of tables in which tasks look up rows and no more.
    """
    known = routes(graph)
    whole = sum(n for b, n in needed.items() if b not in known)
    chosen = [(n, known[b].most_bytes(n), True) for b, n in needed.items() if b in known]
    chosen += [(graph.buffers[b].nbytes, n, False) for b, n in looked_up.items()]
    found = {(Fraction(1), False): whole}
    for nbytes, used, is_routed in chosen:
        key = (Fraction(used, max(1, nbytes)), is_routed)
        found[key] = found.get(key, 0) + nbytes
    return tuple(_Part(nbytes, *key) for key, nbytes in found.items())


def _most_kept_bytes(rooms: list[_Room], used_bytes: int) -> int:
    """Return the largest sum of kept bytes that the conditions of the bound allow."""
    if any(room.spare_bytes < 0 for room in rooms):
        return 0
    most = min([used_bytes, *(room.spare_bytes + room.read_bytes for room in rooms)])
    total = num = 0
    for room in _family(rooms):  # least spare bytes first
        # The first ``num`` tasks force num * kept - total bytes to be kept, the others none.
        if num > 1 and total // (num - 1) <= room.spare_bytes:
            break
        total, num = total + room.spare_bytes, num + 1
    return min(most, total // (num - 1)) if num > 1 else most


def _family(rooms: list[_Room]) -> list[_Room]:
    """Choose tasks that read weights and share none, least spare bytes first."""
    chosen: list[_Room] = []
    taken: set[int] = set()
    for room in sorted(rooms, key=lambda room: room.spare_bytes):
        if room.weights and taken.isdisjoint(room.weights):
            chosen.append(room)
            taken.update(room.weights)
    return chosen


# The time that waits for routers.


def _windows(graph: TaskGraph) -> list[tuple[int, int]]:
    """List the spans from a router to the last task that uses its experts; overlaps are merged."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted((r.source, r.task) for r in routes(graph).values()):
        if found and begin < found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _outside_windows(graph: TaskGraph) -> list[int]:
    """List the tasks that cannot run between a router and its experts, even if they are delayed.

    Window n begins when its router has run and ends when the last task that uses its experts
    begins. A task runs outside if it needs the results of window n - 1 and window n needs its own.
    """
    windows = _windows(graph)
    opens = {begin: n for n, (begin, _) in enumerate(windows)}
    closes = {end: n + 1 for n, (_, end) in enumerate(windows)}
    behind = [0] * len(graph.buffers)  # the windows that the contents of a buffer wait for
    earliest: list[int] = []
    for task in graph.tasks:
        n = max([closes.get(task.index, 0), *(behind[b] for b in task.reads)])
        earliest.append(n)
        for b in task.writes:
            behind[b] = n
        for b in task.touches:
            behind[b] = max(behind[b], n)
    before = [len(windows)] * len(graph.buffers)  # the first window that needs the contents
    outside: list[int] = []
    for task in reversed(graph.tasks):
        made = (*task.writes, *task.touches)
        n = min([opens.get(task.index, len(windows)), *(before[b] for b in made)])
        if n == earliest[task.index]:
            outside.append(task.index)
        for b in task.writes:
            before[b] = len(windows)
        for b in task.reads:
            before[b] = min(before[b], n)
    return outside
