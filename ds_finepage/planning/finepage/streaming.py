"""Yields plans in which a part of the weights streams through a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from ds_finepage.graph.memgraph import Extent, MemGraph
from ds_finepage.planning.finepage.choices import Choice, Chooser
from ds_finepage.planning.finepage.forecast import Forecaster, Plan, can_forecast
from ds_finepage.planning.finepage.held_rows import Held
from ds_finepage.planning.finepage.residency import FIXED_SHARE, RingShape, WeightClasses
from ds_finepage.planning.finepage.ring import place_activations, write_plan
from ds_finepage.planning.finepage.small_arena import weights_by_first_use
from ds_finepage.planning.finepage.stacking import spread_order, stack_down
from ds_finepage.planning.layout import top_of
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.split import packed_units


def streaming_plans(
    problem: Problem,
    *,
    may_split: bool,
    may_win: Callable[[int, int], bool] = lambda *_: True,
    held: Held | None = None,
) -> Iterator[Plan | None]:
    """Yield plans for several lengths of the ring; None where one has no room.

    Args:
        problem: The pass and its arena. If it has shared residents, nothing else is kept.
        may_split: Weights may be cut.
        may_win: Tells whether a plan that reloads at least so many bytes, in at least so many
            copies, is of use.
        held: The activations whose bytes stay taken after their last use.
    """
    weights = WeightClasses.of(problem, may_split=may_split)
    placed = place_activations(problem, held)
    yield from _plans_of(weights, placed, may_win)
    if weights.rows:
        yield from _plans_of(_keeping_rows(weights), placed, may_win)


def _keeping_rows(weights: WeightClasses) -> WeightClasses:
    """Return the same classes, but all rows of KV caches are kept.

    Weights can be cut, and rows cannot. So a little that is missing is better spread over weights.
    """
    nbytes = sum(weights.sizes[b] for b in weights.rows)
    order = [b for b in weights.order if b not in weights.rows]
    return replace(weights, order=order, fixed_bytes=weights.fixed_bytes + nbytes)


def _plans_of(
    weights: WeightClasses, placed: dict[int, Extent], may_win: Callable[[int, int], bool]
) -> Iterator[Plan | None]:
    """Yield a plan for each ring; one that can be predicted is not written."""
    problem, chooser = weights.problem, Chooser(weights)
    room = problem.arena_bytes - top_of(placed)
    forecaster = Forecaster(problem, placed) if can_forecast(problem) else None

    def plans(shapes: Iterable[RingShape]) -> Iterator[Plan | None]:
        for ring in shapes:
            # A pass need not reload all bytes of a routed weight.
            missing = weights.missing_bytes(room - ring.nbytes)
            num_copies = missing // max(1, ring.slice_bytes, weights.most_whole_bytes)
            if not weights.routed and not may_win(missing, num_copies):
                continue
            choice = chooser.choose(room, ring)
            if choice is not None:
                write = partial(plan_streaming, problem, choice, placed, ring.nbytes)
                yield forecaster.forecast(choice, ring.nbytes, write) if forecaster else write()

    shapes = list(dict.fromkeys(weights.ring_shapes(room)))
    num_found = 0
    for plan in plans(s for s in shapes if not weights.has_short_slices(room, s)):
        num_found += plan is not None
        yield plan
    if not num_found:
        short = (s for s in shapes if weights.has_short_slices(room, s))
        yield from plans(sorted(short, key=lambda s: s.nbytes, reverse=True))


def plan_streaming(
    problem: Problem, choice: Choice, placed: dict[int, Extent], ring_bytes: int
) -> MemGraph | None:
    """Plan with a choice of weights to stream.

    Args:
        problem: The pass, before weights were cut, and its arena.
        choice: The cut pass, and the weights that stream through it.
        placed: The extents of the activations. Cutting appends tasks, but it does not change the
            order of live ranges, so these extents hold for the cut pass too.
        ring_bytes: Length of the ring.

    Returns:
        None if the kept weights or a streamed one do not fit.
    """
    cut = problem.of(choice.graph)
    elsewhere = {*choice.streamed, *choice.shared}
    kept = [b for b in weights_by_first_use(cut.graph) if b not in elsewhere]
    sizes = cut.sizes(kept)
    small = FIXED_SHARE * max(sizes.values(), default=0)
    units = packed_units(cut.graph)
    behind = {b for lead, unit in units.items() if lead in sizes for b in unit}
    first = [b for b in kept if b not in behind]
    order = [b for b in first if sizes[b] <= small]
    order += spread_order([b for b in first if sizes[b] > small])
    # What belongs together lies together, so that another pass can keep all of it.
    order = [b for lead in order for b in (lead, *units.get(lead, ())) if b in sizes]
    assert len(order) == len(kept), "every kept weight has a place"
    top = min((e.offset for e in choice.shared.values()), default=problem.top)
    residents = {**choice.shared, **stack_down(order, sizes, top)}
    if residents and not problem.shared:
        # Whole weights rarely fill the room beside the ring; a longer ring looks farther ahead.
        bottom = min(extent.offset for extent in residents.values())
        ring_bytes = max(ring_bytes, bottom - top_of(placed))
    return write_plan(
        cut,
        streamed=choice.streamed,
        activations=placed,
        ring_bytes=ring_bytes,
        residents=residents,
    )
