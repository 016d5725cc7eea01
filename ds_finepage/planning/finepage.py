"""Policy ``finepage``: plan for the pass that comes again (floor 2, no torch).

Decode repeats one graph, so the bytes that a steady pass reloads are the bytes that are not kept
from one pass to the next. Part of the weights is kept for good, the rest streams through a ring;
exit residency equals entry residency.

Which bytes are kept hardly changes how many have to be reloaded, but decides the time: misses that
are spread evenly hide behind compute, a resident head with a streamed tail does not. With ``split``
every weight that can be cut keeps the same share of its rows; without it, whole weights are chosen
evenly over the pass. How long the ring is, is found by trying: a short one keeps more, a long one
looks farther ahead.

Where not all weights fit, the pass in which masks and the like are made again instead of being held
(``recompute``) is tried too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import Extent, MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.exact import is_tiny, plan_exact
from ds_finepage.planning.keeping import (
    FIXED_SHARE,
    STREAM_FACTORS,
    candidates,
    least_lower_bytes,
    plan_keeping,
    weights_by_first_use,
)
from ds_finepage.planning.layout import top_of
from ds_finepage.planning.liveness import aligned, min_arena_bytes, require_feasible, uses
from ds_finepage.planning.recompute import recompute
from ds_finepage.planning.simulator import simulate
from ds_finepage.planning.split import Divisible, cut_weights, divisible_weights, gather_rows
from ds_finepage.planning.standing import Standing, spread_order, stack_down
from ds_finepage.planning.stream import StreamPlanner, place_activations

RING_SHARES = (0.012, 0.018, 0.006, 0.03)
"""Lengths of the ring to try, as shares of the bytes that have to be reloaded."""

RING_WEIGHTS = (1.0, 2.0, 1.5, 3.0, 4.0)
"""Lengths of the ring to try where whole weights go through it, in units of the largest."""

SLICES_IN_RING = 4
GOOD_ENOUGH = 1.02
"""A plan this close to its lower bound of time ends the search."""

MAX_TASKS_FOR_HORIZON = 400
"""Beyond this the two-horizon search, which costs seconds then, is the last resort."""


@dataclass(frozen=True, slots=True)
class _Chosen:
    """A taskgraph, cut or not, with the weights to stream in the order of their use."""

    graph: TaskGraph
    streamed: list[int]
    standing: Mapping[int, Extent] = field(default_factory=dict)  # kept, at these places


def plan_finepage(
    graph: TaskGraph,
    *,
    arena_bytes: int,
    alignment: int,
    profile: HardwareProfile | None = None,
    split: bool = False,
    standing: Sequence[Standing] = (),
) -> MemGraph:
    """Plan a cyclic pass: the fastest, and of equally fast plans the one with fewest bytes.

    Args:
        graph: The pass.
        arena_bytes: Size of the arena.
        alignment: Of extents, in bytes.
        profile: Rates to predict the time with. Without one, bytes alone decide.
        split: Cut matrix products along their output features, and bring in the rows of
            an embedding instead of its table.
        standing: What the pass that comes before and after this one keeps in the same arena,
            uppermost first. It is left in place as far as there is room, and nothing else is kept
            that would have to be brought in each time.

    Returns:
        The plan. Its taskgraph is another one where weights are cut or cheap tasks run again.

    Raises:
        PlanInfeasibleError: Some task's working set is larger than the arena.
    """
    search = _Search(arena_bytes, alignment, profile)
    if standing:
        search.try_with_and_without_recomputing(
            graph,
            lambda g: search.try_standing(
                gather_rows(g) if split else g, standing, may_split=split
            ),
        )
        if search.best is not None:
            return search.best
    has_room = split and search.try_with_and_without_recomputing(graph, search.try_cutting)
    if search.best is None:
        require_feasible(graph, arena_bytes, alignment)
    if not has_room and (search.best is None or min_arena_bytes(graph, alignment) <= arena_bytes):
        whole = _Search(arena_bytes, alignment, profile)
        whole.try_with_and_without_recomputing(graph, whole.try_whole)
        search.offer(whole.best)
    assert search.best is not None, "keeping nothing is always possible"
    return search.best


class _Search:
    """Tries plans and remembers the best."""

    def __init__(self, arena_bytes: int, alignment: int, profile: HardwareProfile | None) -> None:
        self._arena_bytes, self._alignment = arena_bytes, alignment
        self._top = arena_bytes // alignment * alignment
        self._profile = profile
        self._total_ns = self._moved = 0
        self.best: MemGraph | None = None

    def moves_nothing(self) -> bool:
        return self.best is not None and _moved_bytes(self.best) == 0

    def offer(self, plan: MemGraph | None) -> bool:
        """Take a plan if it is the best so far; return whether it ends the search."""
        if plan is None:
            return False
        moved = _moved_bytes(plan)
        if self._profile is None:
            total_ns, is_good = 0, moved == 0
        else:
            timeline = simulate(plan, self._profile)
            total_ns = timeline.total_ns
            is_good = total_ns <= GOOD_ENOUGH * timeline.lower_bound_ns
        if self._is_better(total_ns, moved):
            self._total_ns, self._moved, self.best = total_ns, moved, plan
        return is_good

    def _is_better(self, total_ns: int, moved: int) -> bool:
        """Time decides, but times within a percent are the same time: fewer bytes decide then."""
        if self.best is None or total_ns * 101 < self._total_ns * 100:
            return True
        return total_ns * 100 <= self._total_ns * 101 and moved < self._moved

    def try_with_and_without_recomputing(
        self, graph: TaskGraph, attempt: Callable[[TaskGraph], bool]
    ) -> bool:
        """Try the pass as it is, and where something moves, with cheap tasks run again.

        Args:
            graph: The pass.
            attempt: Offers plans of a taskgraph; returns whether weights can stream through it.

        Returns:
            What it returned for the pass as it is.
        """
        has_room = attempt(graph)
        if self.moves_nothing():
            return has_room
        # Where activations leave no room for a ring, room is what counts, whatever it costs.
        again = recompute(graph, self._alignment, self._profile if has_room else None)
        if again is not graph:
            attempt(again)
        return has_room

    def try_cutting(self, graph: TaskGraph) -> bool:
        """Offer plans that cut weights, unless all of them have room as they are."""
        self.try_resident(graph)
        if not self.moves_nothing():
            return self.try_streaming(gather_rows(graph), may_split=True)
        return True

    def try_whole(self, graph: TaskGraph) -> bool:
        """Offer plans that leave weights in one piece."""
        has_room = self.try_streaming(graph, may_split=False)
        is_small = len(graph.tasks) <= MAX_TASKS_FOR_HORIZON
        if self.best is None or (is_small and not self.moves_nothing()):
            self.try_keeping(graph)
        if is_tiny(graph) and not self.moves_nothing():
            self.try_exact(graph)
        return has_room

    # Streaming through a ring.

    def try_resident(self, graph: TaskGraph) -> None:
        """Offer the plan that moves nothing, if there is room for it."""
        placed = place_activations(graph, self._alignment)
        weights = _Weights.of(graph, self._alignment, may_split=False)
        if weights.missing_bytes(self._arena_bytes - top_of(placed)) <= 0:
            self.offer(self._plan_streaming(_Chosen(graph, []), placed, 0))

    def try_streaming(self, graph: TaskGraph, *, may_split: bool) -> bool:
        """Offer plans with a ring; return whether there is room for one."""
        placed = place_activations(graph, self._alignment)
        room = self._arena_bytes - top_of(placed)
        weights = _Weights.of(graph, self._alignment, may_split=may_split)
        has_room = False
        for ring_bytes in weights.ring_sizes(room):
            chosen = weights.choose(room, ring_bytes)
            if chosen is None:
                continue
            plan = self._plan_streaming(chosen, placed, ring_bytes)
            has_room = has_room or plan is not None
            if self.offer(plan):
                break
        return has_room

    def _plan_streaming(
        self, chosen: _Chosen, placed: dict[int, Extent], ring_bytes: int
    ) -> MemGraph | None:
        graph, elsewhere = chosen.graph, {*chosen.streamed, *chosen.standing}
        kept = [b for b in weights_by_first_use(graph) if b not in elsewhere]
        sizes = {b: aligned(graph.buffers[b].nbytes, self._alignment) for b in kept}
        small = FIXED_SHARE * max(sizes.values(), default=0)
        top = min((e.offset for e in chosen.standing.values()), default=self._top)
        order = [b for b in kept if sizes[b] <= small]
        order += spread_order([b for b in kept if sizes[b] > small])
        # Cutting appends tasks, so live ranges shift, but their order and so the layout stand.
        return StreamPlanner(
            chosen.graph,
            arena_bytes=self._arena_bytes,
            alignment=self._alignment,
            streamed=chosen.streamed,
            activations=placed,
            activation_bytes=top_of(placed),
            ring_bytes=ring_bytes,
            residents={**chosen.standing, **stack_down(order, sizes, top)},
        ).plan()

    # Leaving in place what another pass keeps.

    def try_standing(
        self, graph: TaskGraph, standing: Sequence[Standing], *, may_split: bool
    ) -> bool:
        """Offer plans that keep nothing else; return whether there is room for a ring."""
        placed = place_activations(graph, self._alignment)
        weights = _Weights.of(graph, self._alignment, may_split=may_split)
        room, has_room = self._arena_bytes - top_of(placed), False
        for ring_bytes in weights.ring_sizes(room):
            chosen = weights.choose_standing(standing, top_of(placed), ring_bytes, self._top)
            if chosen is None:
                continue
            plan = self._plan_streaming(chosen, placed, ring_bytes)
            has_room = has_room or plan is not None
            if self.offer(plan):
                return True
        if not may_split and len(graph.tasks) <= MAX_TASKS_FOR_HORIZON:
            self._try_keeping_standing(graph, standing)
        return has_room

    def _try_keeping_standing(self, graph: TaskGraph, standing: Sequence[Standing]) -> None:
        weights = weights_by_first_use(graph)
        mine = {graph.buffers[b].key: b for b in weights}
        at = {mine[s.buffer.key]: s.extent for s in standing if s.buffer.key in mine}
        least = least_lower_bytes(graph, at.keys(), self._alignment)
        tried = set()
        for lower_bytes in (0, *(int(least * factor) for factor in STREAM_FACTORS)):
            kept = {b: e for b, e in at.items() if e.offset >= lower_bytes}
            if frozenset(kept) not in tried:
                tried.add(frozenset(kept))
                self.offer(plan_keeping(graph, weights, kept, self._arena_bytes, self._alignment))

    def try_exact(self, graph: TaskGraph) -> None:
        self.offer(plan_exact(graph, arena_bytes=self._arena_bytes, alignment=self._alignment))

    # Sharing bytes between activations and streamed weights.

    def try_keeping(self, graph: TaskGraph) -> None:
        weights = weights_by_first_use(graph)
        sizes = {b: aligned(graph.buffers[b].nbytes, self._alignment) for b in weights}
        for chosen in candidates(graph, weights, self._arena_bytes, self._alignment):
            order = spread_order([b for b in weights if b in chosen])
            kept = stack_down(order, sizes, self._top)
            self.offer(plan_keeping(graph, weights, kept, self._arena_bytes, self._alignment))
            if self.moves_nothing():
                return


@dataclass(frozen=True)
class _Weights:
    """The weights of a pass, by what can be done with them. Sizes are aligned."""

    graph: TaskGraph
    alignment: int
    sizes: dict[int, int]
    order: list[int]  # that may be streamed, by use
    divisible: dict[int, Divisible]
    handed: frozenset[int]  # that each call brings anew, and so are always streamed
    fixed_bytes: int  # of the others, which are always kept

    @classmethod
    def of(cls, graph: TaskGraph, alignment: int, *, may_split: bool) -> _Weights:
        order = weights_by_first_use(graph, handed=True)
        handed = frozenset(b for b in order if graph.buffers[b].gather is not None)
        sizes = {b: aligned(graph.buffers[b].nbytes, alignment) for b in order}
        largest = max(sizes.values(), default=0)
        times_used = uses(graph)
        divisible = {d.buffer: d for d in divisible_weights(graph)} if may_split else {}
        # A bias would be used by every slice, and stand in the way of those behind it.
        shared = {b for d in divisible.values() for b in graph.paged(graph.tasks[d.task])}
        streamable = [
            b
            for b in order
            if b in divisible
            or b in handed
            or (len(times_used[b]) == 1 and sizes[b] > FIXED_SHARE * largest and b not in shared)
        ]
        return cls(
            graph=graph,
            alignment=alignment,
            sizes=sizes,
            order=streamable,
            divisible=divisible,
            handed=handed,
            fixed_bytes=sum(sizes[b] for b in order) - sum(sizes[b] for b in streamable),
        )

    def ring_sizes(self, room: int) -> Iterator[int]:
        """Yield lengths of the ring to try, 0 first where everything fits."""
        missing = self.missing_bytes(room)
        if missing <= 0:
            yield 0
            return
        least = self.least_ring_bytes()
        if not self.divisible:
            whole = sorted({self.sizes[b] for b in self.order}, reverse=True)[:3]
            sizes = {aligned(int(most * f), self.alignment) for most in whole for f in RING_WEIGHTS}
            yield from sorted(sizes)
            return
        sizes = {aligned(max(least, int(missing * f)), self.alignment) for f in RING_SHARES}
        # Half of the largest weight is plenty, and less than who never cuts has to keep free.
        plenty = max(self.sizes[b] for b in self.divisible) // 2
        share = min(int(missing * RING_SHARES[0]), plenty)
        first = aligned(max(least, share), self.alignment)
        yield first
        yield from sorted((sizes | {least}) - {first}, reverse=True)

    def missing_bytes(self, room: int) -> int:
        """Count the bytes that cannot all be kept in ``room``."""
        missing = sum(self.sizes[b] for b in self.order) + self.fixed_bytes - room
        return max(missing, sum(self.sizes[b] for b in self.handed))

    def least_ring_bytes(self) -> int:
        """Return the shortest ring through which all weights that may be streamed can go."""
        slices = [_quantum(d) * d.row_bytes for d in self.divisible.values()]
        whole = [self.sizes[b] for b in self.order if b not in self.divisible]
        return max([2 * aligned(max(slices, default=0), self.alignment), *whole])

    def choose(self, room: int, ring_bytes: int) -> _Chosen | None:
        """Choose what is kept in ``room`` beside a ring; None where that cannot be done."""
        left = room - self.fixed_bytes - ring_bytes
        if left < 0:
            return None
        if ring_bytes == 0:
            return _Chosen(self.graph, [])
        always = [b for b in self.order if b not in self.divisible and self.sizes[b] > ring_bytes]
        if not self.handed.isdisjoint(always):
            return None
        left -= sum(self.sizes[b] for b in always)
        if left < 0:
            return None
        rest = [b for b in self.order if b not in set(always) and b not in self.handed]
        total = sum(self.sizes[b] for b in rest)
        kept: set[int] = set(always)
        kept_rows: dict[int, int] = {}
        due = 0  # bytes to keep that rounding has left over, in units of 1/total
        for buffer in rest:
            due += self.sizes[buffer] * min(left, total)
            if buffer in self.divisible:
                weight = self.divisible[buffer]
                unit = _quantum(weight) * weight.row_bytes * total
                rows = max(0, min(due // unit * _quantum(weight), weight.num_rows))
                due -= rows * weight.row_bytes * total
                kept_rows[buffer] = rows
            elif due >= self.sizes[buffer] * total:
                due -= self.sizes[buffer] * total
                kept.add(buffer)
        return _Chosen(*self._cut(kept_rows, kept, ring_bytes))

    def choose_standing(
        self, standing: Sequence[Standing], lower: int, ring_bytes: int, top: int
    ) -> _Chosen | None:
        """Choose to keep just what stands above activations and ring, and what must be kept.

        Args:
            standing: What there is to keep, uppermost first.
            lower: Bytes of the activations.
            ring_bytes: Size of the ring.
            top: Upper end of the arena.

        Returns:
            None where it cannot be done.
        """
        streamable = set(self.order)
        must = {
            b
            for b in self.sizes
            if b not in streamable or (b not in self.divisible and self.sizes[b] > ring_bytes)
        }
        if not self.handed.isdisjoint(must):
            return None
        names = {self.graph.buffers[b].name: b for b in self.sizes if b not in self.handed}
        kept: dict[int, Standing] = {}
        need = sum(self.sizes[b] for b in must)
        for piece in standing:
            buffer = names.get(piece.buffer.name)
            if buffer is None or not self._can_keep(buffer, piece):
                continue
            still = need - self.sizes[buffer] if buffer in must else need
            if piece.extent.offset - still < lower + ring_bytes:
                break
            kept[buffer], need, top = piece, still, piece.extent.offset
        if top - need < lower + ring_bytes:
            return None
        rows = {
            b: kept[b].buffer.nbytes // self.divisible[b].row_bytes if b in kept else 0
            for b in self.order
            if b in self.divisible
        }
        cut, streamed = self._cut(rows, must | kept.keys(), ring_bytes)
        extents = {s.buffer.key: s.extent for s in kept.values()}
        return _Chosen(
            cut,
            streamed,
            {b.id: extents[b.key] for b in cut.buffers if b.key in extents},
        )

    def _can_keep(self, buffer: int, piece: Standing) -> bool:
        """Tell whether another pass's piece of a weight is one that this pass can keep."""
        whole = self.graph.buffers[buffer]
        if piece.buffer.offset or piece.buffer.gather is not None or whole.gather is not None:
            return False
        if piece.buffer.nbytes == whole.nbytes:
            return True
        return buffer in self.divisible and not piece.buffer.nbytes % (
            _quantum(self.divisible[buffer]) * self.divisible[buffer].row_bytes
        )

    def _cut(
        self, kept_rows: dict[int, int], kept: set[int], ring_bytes: int
    ) -> tuple[TaskGraph, list[int]]:
        """Cut all divisible weights, each behind the rows of it that are kept."""
        cuts, head = {}, 0
        for buffer in self.order:
            if buffer in kept_rows:
                cuts[buffer], head = self._slices(
                    self.divisible[buffer], kept_rows[buffer], head, ring_bytes
                )
            elif buffer not in kept:
                head = self.sizes[buffer] + (head if head + self.sizes[buffer] <= ring_bytes else 0)
        cut = cut_weights(self.graph, cuts)
        return cut, self._streamed(cut, kept - kept_rows.keys(), kept_rows)

    def _slices(
        self, weight: Divisible, kept_rows: int, head: int, ring_bytes: int
    ) -> tuple[list[int], int]:
        """Cut a weight into the part that is kept and slices for the ring.

        A slice ends where the ring does, so that nothing of the ring is left empty.

        Returns:
            The rows at which the slices begin, and where in the ring the next one will lie.
        """
        quantum = _quantum(weight)
        most = ring_bytes // SLICES_IN_RING // weight.row_bytes // quantum * quantum
        starts = [0] if kept_rows else []
        at = kept_rows
        while at < weight.num_rows:
            space = (ring_bytes - head) // weight.row_bytes // quantum * quantum
            if space <= 0 < head:
                head = 0
                continue
            starts.append(at)
            num_rows = min(weight.num_rows - at, max(quantum, min(most, space)))
            at += num_rows
            head += aligned(num_rows * weight.row_bytes, self.alignment)
        return starts or [0], head

    def _streamed(self, cut: TaskGraph, kept: set[int], kept_rows: dict[int, int]) -> list[int]:
        """List the weights and slices of the cut graph that are to be streamed, by use."""
        kept_bytes = {
            self.graph.buffers[b].name: rows * self.divisible[b].row_bytes
            for b, rows in kept_rows.items()
        }
        may_stream = set(self.order)
        found = []
        for buffer in weights_by_first_use(cut, handed=True):
            part = cut.buffers[buffer]
            if part.name in kept_bytes:
                if part.offset >= kept_bytes[part.name]:
                    found.append(buffer)
            elif buffer in may_stream and buffer not in kept:
                found.append(buffer)
        return found


def min_split_arena_bytes(graph: TaskGraph, alignment: int) -> int:
    """Return the smallest arena in which ``plan_finepage(..., split=True)`` finds a plan."""
    least = min_arena_bytes(graph, alignment)
    for candidate in (graph, recompute(graph, alignment)):
        gathered = gather_rows(candidate)
        weights = _Weights.of(gathered, alignment, may_split=True)
        ring_bytes = weights.least_ring_bytes() if weights.order else 0
        placed = place_activations(gathered, alignment)
        least = min(least, top_of(placed) + weights.fixed_bytes + ring_bytes)
    return least


def _quantum(weight: Divisible) -> int:
    """Rows that are cut together, so that what is left is still a good shape for a kernel."""
    return 64 if weight.num_rows >= 1024 else 16 if weight.num_rows >= 128 else 1


def _moved_bytes(plan: MemGraph) -> int:
    return plan.reloaded_bytes + plan.offloaded_bytes
