"""Lower bounds on the bytes that any plan must copy.

Computed from the taskgraph alone, by code that shares nothing with the policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.units import align_up


@dataclass(frozen=True, slots=True)
class _Room:
    """The room that one task leaves to weights that it does not read."""

    spare_bytes: int  # the arena, less the buffers that the task names
    read_bytes: int  # of the weights that it reads
    weights: tuple[int, ...]


def lower_bound_bytes(graph: TaskGraph, arena_bytes: int, alignment: int) -> int:
    """Return the bytes that every steady pass of whole weights has to reload at least.

    *Steady* means that the pass is repeated and its exit residency is its entry residency. The
    proof holds for every policy and every order of the tasks, even if weights are kept by the byte:

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
    it tries only one family, chosen greedily by ``spare``.

    Args:
        graph: The pass.
        arena_bytes: Size of the arena.
        alignment: Of extents, in bytes; the buffers that a task names count in whole units.

    Returns:
        Bytes, never negative. If some task does not fit into the arena there is no plan, and no
        byte is counted as kept.
    """
    used: set[int] = set()
    rooms: list[_Room] = []
    # An extent may begin in the last unit of the arena even if that unit is cut off.
    arena = align_up(arena_bytes, alignment)
    for task in graph.tasks:
        named = [graph.buffers[b] for b in graph.paged(task)]
        weights = [b for b in named if b.kind is BufferKind.WEIGHT]
        used.update(b.id for b in weights)
        rooms.append(
            _Room(
                spare_bytes=arena - sum(align_up(b.nbytes, alignment) for b in named),
                read_bytes=sum(b.nbytes for b in weights),
                weights=tuple(b.id for b in weights),
            )
        )
    sizes = {b: graph.buffers[b].nbytes for b in used}
    return _reloaded_bytes(graph, sizes, 0, _most_kept_bytes(rooms, sum(sizes.values())))


def divisible_lower_bound_bytes(graph: TaskGraph, arena_bytes: int, alignment: int) -> int:
    """Return the bytes that every steady pass has to reload at least, even if weights are cut.

    The argument of :func:`lower_bound_bytes` with weaker conditions. A task needs its activations
    in the arena, but perhaps only a few bytes of a weight at a time, and only the looked-up rows of
    an embedding table. So at most ``arena - max(activations that one task names)`` bytes of weights
    are kept, and the others are reloaded. This holds for schedules that run tasks twice too.

    Args:
        graph: The pass.
        arena_bytes: Size of the arena.
        alignment: Of extents, in bytes; the buffers that a task names count in whole units.

    Returns:
        Bytes, never negative.
    """
    needed: dict[int, int] = {}
    looked_up_bytes = most_activation_bytes = 0
    for task in graph.tasks:
        named = [graph.buffers[b] for b in graph.paged(task)]
        weights = [b for b in named if b.kind is BufferKind.WEIGHT]
        activation_bytes = sum(align_up(b.nbytes, alignment) for b in named if b not in weights)
        most_activation_bytes = max(most_activation_bytes, activation_bytes)
        if task.op == _EMBEDDING:
            rows = sum(graph.buffers[b].nbytes for b in task.writes)
            looked_up_bytes += min(rows, sum(w.nbytes for w in weights))
        else:
            needed.update({w.id: w.nbytes for w in weights})
    kept_bytes = align_up(arena_bytes, alignment) - most_activation_bytes
    return _reloaded_bytes(graph, needed, looked_up_bytes, max(0, kept_bytes))


_EMBEDDING = "aten.embedding.default"


def _reloaded_bytes(
    graph: TaskGraph, sizes: dict[int, int], others_bytes: int, kept_bytes: int
) -> int:
    """Return the bytes left to reload if some are kept, those that save most first.

    A routed weight (experts) counts as many slices as a pass uses at most, so to keep a byte of it
    saves only a share of a byte. A pass whose tokens choose the same experts may reload fewer.

    Args:
        graph: The pass.
        sizes: Weight -> bytes.
        others_bytes: Bytes beside these weights that have to be reloaded.
        kept_bytes: Bytes that are kept.
    """
    known = routes(graph)
    whole = sum(n for b, n in sizes.items() if b not in known) + others_bytes
    reloaded = max(0, whole - kept_bytes)
    kept_bytes = max(0, kept_bytes - whole)
    shares = [(known[b].most_bytes(n), n) for b, n in sizes.items() if b in known]
    for used, nbytes in sorted(shares, key=lambda s: Fraction(*s), reverse=True):
        kept = min(kept_bytes, nbytes)
        kept_bytes -= kept
        reloaded += used - used * kept // nbytes - bool(used * kept % nbytes)
    return reloaded


def _most_kept_bytes(rooms: list[_Room], used_bytes: int) -> int:
    """Return the largest sum of kept bytes that the conditions of the bound allow."""
    if any(room.spare_bytes < 0 for room in rooms):
        return 0
    most = min([used_bytes, *(room.spare_bytes + room.read_bytes for room in rooms)])
    spares = [room.spare_bytes for room in _family(rooms)]
    # The bytes that the family forces to be kept are convex in ``kept`` and 0 at first, so they
    # stay below ``kept`` up to one point and above it from there on.
    least = 0
    while least < most:
        kept = (least + most + 1) // 2
        if sum(max(0, kept - spare) for spare in spares) <= kept:
            least = kept
        else:
            most = kept - 1
    return least


def _family(rooms: list[_Room]) -> list[_Room]:
    """Choose tasks that read weights and share none, least spare bytes first."""
    chosen: list[_Room] = []
    taken: set[int] = set()
    for room in sorted(rooms, key=lambda room: room.spare_bytes):
        if room.weights and taken.isdisjoint(room.weights):
            chosen.append(room)
            taken.update(room.weights)
    return chosen
