"""Lower bounds on what any plan must copy, to hold plans against.

Computed from the taskgraph alone, and by code that shares nothing with the policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from ds_finepage.graph.routes import routes
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph


@dataclass(frozen=True, slots=True)
class _Room:
    """What one task leaves to weights that it does not read itself."""

    spare_bytes: int  # the arena, less all that the task needs resident
    read_bytes: int  # of the weights that it reads
    weights: tuple[int, ...]


def lower_bound_bytes(graph: TaskGraph, arena_bytes: int, alignment: int) -> int:
    """Return a number of bytes that every steady pass has to reload at least.

    *Steady* means that the pass is repeated and its exit residency is its entry residency. Whatever
    the policy, the order of the tasks, and even if weights could be kept by the byte:

    1. Let ``kept[w]`` be the bytes of weight w that the pass does not reload. Something has to
       provide them when w is used, so they are resident when the pass begins; and since they are
       resident again when it ends, without a reload, they never leave the arena in between. Every
       other byte of a weight that is used is reloaded at least once. So the pass reloads at least
       ``used - sum(kept)``.
    2. While a task runs, the arena holds *at one time* the activations and weights that the task
       itself names, and the kept bytes of all other weights. (Other live activations may have been
       offloaded, or may be made again by running their tasks once more, so they are not counted; a
       task that runs twice names as many bytes each time.) With ``spare`` the arena less all that
       the task names::

           sum(kept) - sum(kept[w] for w that the task reads) <= spare         for every task

    3. A task that reads weights therefore forces ``sum(kept) - spare`` bytes of *its* weights to be
       among the kept ones. Tasks that share no weight force different bytes, so for any family of
       such tasks::

           sum(max(0, sum(kept) - spare[t]) for t in family) <= sum(kept)

    The largest ``sum(kept)`` that obeys 2 (where a task's weights are kept entirely) and 3 gives
    the bound. For equal weights, each read once, this is what farthest-next-use reaches on a cycle;
    in general it is a bound and not the optimum: fragmentation, offloads and indivisible buffers
    are left out, and only one family is tried, chosen greedily by ``spare``.

    Args:
        graph: The pass.
        arena_bytes: Size of the arena.
        alignment: Of extents, in bytes; what a task names is counted in whole units.

    Returns:
        Bytes, never negative. If some task does not fit into the arena there is no plan, and no
        byte is counted as kept.
    """
    used: set[int] = set()
    rooms: list[_Room] = []
    # The last unit of the arena may be a part of one, and still begin an extent.
    arena = _in_units(arena_bytes, alignment)
    for task in graph.tasks:
        named = [graph.buffers[b] for b in graph.paged(task)]
        weights = [b for b in named if b.kind is BufferKind.WEIGHT]
        used.update(b.id for b in weights)
        rooms.append(
            _Room(
                spare_bytes=arena - sum(_in_units(b.nbytes, alignment) for b in named),
                read_bytes=sum(b.nbytes for b in weights),
                weights=tuple(b.id for b in weights),
            )
        )
    sizes = {b: graph.buffers[b].nbytes for b in used}
    return _reloaded_bytes(graph, sizes, 0, _most_kept_bytes(rooms, sum(sizes.values())))


def divisible_lower_bound_bytes(graph: TaskGraph, arena_bytes: int, alignment: int) -> int:
    """Return what every steady pass has to reload at least, even if weights are cut at will.

    The argument of :func:`lower_bound_bytes` with less to go on: a task has to have its activations
    in the arena, of a weight perhaps only a few bytes at a time, and of an embedding table only the
    rows that it looks up. So at most ``arena - max(activations that one task names)`` bytes of
    weights are kept, and the others are reloaded. It holds for schedules that run tasks twice too.

    Args:
        graph: The pass.
        arena_bytes: Size of the arena.
        alignment: Of extents, in bytes; what a task names is counted in whole units.

    Returns:
        Bytes, never negative.
    """
    needed: dict[int, int] = {}
    looked_up_bytes = most_activation_bytes = 0
    for task in graph.tasks:
        named = [graph.buffers[b] for b in graph.paged(task)]
        weights = [b for b in named if b.kind is BufferKind.WEIGHT]
        activation_bytes = sum(_in_units(b.nbytes, alignment) for b in named if b not in weights)
        most_activation_bytes = max(most_activation_bytes, activation_bytes)
        if task.op == _EMBEDDING:
            rows = sum(graph.buffers[b].nbytes for b in task.writes)
            looked_up_bytes += min(rows, sum(w.nbytes for w in weights))
        else:
            needed.update({w.id: w.nbytes for w in weights})
    kept_bytes = _in_units(arena_bytes, alignment) - most_activation_bytes
    return _reloaded_bytes(graph, needed, looked_up_bytes, max(0, kept_bytes))


_EMBEDDING = "aten.embedding.default"


def _reloaded_bytes(
    graph: TaskGraph, sizes: dict[int, int], others_bytes: int, kept_bytes: int
) -> int:
    """Return what is left to reload when so many bytes are kept, those that save most first.

    Of a weight whose slices the pass chooses (experts), as many are counted as it uses at most, so
    a byte of it that is kept saves but a share of a byte; a pass in which tokens agree on experts
    may move less yet.
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


def _in_units(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _most_kept_bytes(rooms: list[_Room], used_bytes: int) -> int:
    """Return the largest sum of kept bytes that the conditions of the bound allow."""
    if any(room.spare_bytes < 0 for room in rooms):
        return 0
    most = min([used_bytes, *(room.spare_bytes + room.read_bytes for room in rooms)])
    spares = [room.spare_bytes for room in _family(rooms)]
    # What the family forces grows from 0 and is convex, so it is below the diagonal up to one
    # point and above it from there on.
    least = 0
    while least < most:
        kept = (least + most + 1) // 2
        if sum(max(0, kept - spare) for spare in spares) <= kept:
            least = kept
        else:
            most = kept - 1
    return least


def _family(rooms: list[_Room]) -> list[_Room]:
    """Choose tasks that read weights and share none, those with the least to spare first."""
    chosen: list[_Room] = []
    taken: set[int] = set()
    for room in sorted(rooms, key=lambda room: room.spare_bytes):
        if room.weights and taken.isdisjoint(room.weights):
            chosen.append(room)
            taken.update(room.weights)
    return chosen
