"""Policy ``finepage``: plan for the pass that comes again.

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

from collections.abc import Callable, Sequence

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import Extent, MemGraph
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.exact import is_tiny, plan_exact
from ds_finepage.planning.finepage.residency import Chosen, Shares
from ds_finepage.planning.finepage.ring import StreamPlanner, place_activations
from ds_finepage.planning.finepage.small_arena import (
    FIXED_SHARE,
    STREAM_FACTORS,
    candidates,
    least_lower_bytes,
    plan_keeping,
    weights_by_first_use,
)
from ds_finepage.planning.finepage.stacking import SharedResident, spread_order, stack_down
from ds_finepage.planning.layout import top_of
from ds_finepage.planning.liveness import aligned, min_arena_bytes, require_feasible
from ds_finepage.planning.rewrite.late_experts import wait_for_routes
from ds_finepage.planning.rewrite.recompute import recompute
from ds_finepage.planning.rewrite.split import gather_rows
from ds_finepage.planning.simulator import simulate

GOOD_ENOUGH = 1.02
"""A plan this close to its lower bound of time ends the search."""

MAX_TASKS_FOR_HORIZON = 400
"""Beyond this the two-horizon search, which costs seconds then, is the last resort."""


def plan_finepage(
    graph: TaskGraph,
    *,
    arena_bytes: int,
    alignment: int,
    profile: HardwareProfile | None = None,
    split: bool = False,
    shared: Sequence[SharedResident] = (),
) -> MemGraph:
    """Plan a cyclic pass: the fastest, and of equally fast plans the one with fewest bytes.

    Args:
        graph: The pass.
        arena_bytes: Size of the arena.
        alignment: Of extents, in bytes.
        profile: Rates to predict the time with. Without one, bytes alone decide.
        split: Cut matrix products along their output features, and bring in the rows of
            an embedding instead of its table.
        shared: What the pass that comes before and after this one keeps in the same arena,
            uppermost first. It is left in place as far as there is room, and nothing else is kept
            that would have to be brought in each time.

    Returns:
        The plan. Its taskgraph is another one where weights are cut or cheap tasks run again.

    Raises:
        PlanInfeasibleError: Some task's working set is larger than the arena.
    """
    search = _Search(arena_bytes, alignment, profile)
    if shared:
        search.try_with_and_without_recomputing(
            graph,
            lambda g: search.try_shared(gather_rows(g) if split else g, shared, may_split=split),
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
        """Take a plan, or the same with late reloads of experts, if it is the best so far.

        Returns:
            Whether it ends the search.
        """
        if plan is None:
            return False
        late = wait_for_routes(plan)
        is_good = late is not plan and self._offer(late)
        return self._offer(plan) or is_good

    def _offer(self, plan: MemGraph) -> bool:
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
        weights = Shares.of(graph, self._alignment, may_split=False)
        if weights.missing_bytes(self._arena_bytes - top_of(placed)) <= 0:
            self.offer(self._plan_streaming(Chosen(graph, []), placed, 0))

    def try_streaming(self, graph: TaskGraph, *, may_split: bool) -> bool:
        """Offer plans with a ring; return whether there is room for one."""
        placed = place_activations(graph, self._alignment)
        room = self._arena_bytes - top_of(placed)
        weights = Shares.of(graph, self._alignment, may_split=may_split)
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
        self, chosen: Chosen, placed: dict[int, Extent], ring_bytes: int
    ) -> MemGraph | None:
        graph, elsewhere = chosen.graph, {*chosen.streamed, *chosen.shared}
        kept = [b for b in weights_by_first_use(graph) if b not in elsewhere]
        sizes = {b: aligned(graph.buffers[b].nbytes, self._alignment) for b in kept}
        small = FIXED_SHARE * max(sizes.values(), default=0)
        top = min((e.offset for e in chosen.shared.values()), default=self._top)
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
            residents={**chosen.shared, **stack_down(order, sizes, top)},
        ).plan()

    # Leaving in place what another pass keeps.

    def try_shared(
        self, graph: TaskGraph, shared: Sequence[SharedResident], *, may_split: bool
    ) -> bool:
        """Offer plans that keep nothing else; return whether there is room for a ring."""
        placed = place_activations(graph, self._alignment)
        weights = Shares.of(graph, self._alignment, may_split=may_split)
        room, has_room = self._arena_bytes - top_of(placed), False
        for ring_bytes in weights.ring_sizes(room):
            chosen = weights.choose_shared(shared, top_of(placed), ring_bytes, self._top)
            if chosen is None:
                continue
            plan = self._plan_streaming(chosen, placed, ring_bytes)
            has_room = has_room or plan is not None
            if self.offer(plan):
                return True
        if not may_split and len(graph.tasks) <= MAX_TASKS_FOR_HORIZON:
            self._try_keeping_shared(graph, shared)
        return has_room

    def _try_keeping_shared(self, graph: TaskGraph, shared: Sequence[SharedResident]) -> None:
        weights = weights_by_first_use(graph)
        mine = {graph.buffers[b].key: b for b in weights}
        at = {mine[s.buffer.key]: s.extent for s in shared if s.buffer.key in mine}
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


def min_split_arena_bytes(graph: TaskGraph, alignment: int) -> int:
    """Return the smallest arena in which ``plan_finepage(..., split=True)`` finds a plan."""
    least = min_arena_bytes(graph, alignment)
    for candidate in (graph, recompute(graph, alignment)):
        gathered = gather_rows(candidate)
        weights = Shares.of(gathered, alignment, may_split=True)
        ring_bytes = weights.least_ring_bytes() if weights.order else 0
        placed = place_activations(gathered, alignment)
        least = min(least, top_of(placed) + weights.fixed_bytes + ring_bytes)
    return least


def _moved_bytes(plan: MemGraph) -> int:
    return plan.reloaded_bytes + plan.offloaded_bytes
