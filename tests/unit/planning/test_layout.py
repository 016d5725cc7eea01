"""Offline layout: no overlap in time and space, and close to the largest live sum."""

from __future__ import annotations

import random

import pytest

from ds_finepage.graph.memgraph import Extent
from ds_finepage.planning.layout import LiveBuffer, Tenancy, first_fit, place, top_of


def random_live(seed: int) -> list[LiveBuffer]:
    rng = random.Random(seed)
    found = []
    for buffer in range(rng.randint(1, 40)):
        begin = rng.randint(0, 30)
        end = min(30, begin + rng.choice([0, 0, 1, 2, 5, 30]))
        found.append(LiveBuffer(buffer, 64 * rng.randint(1, 12), begin, end))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_buffers_that_live_together_do_not_overlap(seed: int) -> None:
    live = random_live(seed)
    placed = place(live)
    for a in live:
        assert placed[a.buffer].nbytes == a.nbytes
        for b in live:
            if a.buffer < b.buffer and a.begin <= b.end and b.begin <= a.end:
                assert not placed[a.buffer].overlaps(placed[b.buffer])


@pytest.mark.parametrize("seed", range(40))
def test_the_result_does_not_depend_on_the_order_of_the_input(seed: int) -> None:
    live = random_live(seed)
    shuffled = list(live)
    random.Random(seed).shuffle(shuffled)
    assert place(shuffled) == place(live)


def test_a_chain_of_two_sizes_needs_what_is_live_at_most() -> None:
    chain = [LiveBuffer(i, 64 * (1 + i % 2), i, i + 1) for i in range(50)]
    assert top_of(place(chain)) == 64 * 3


@pytest.mark.parametrize("seed", range(40))
def test_items_may_live_in_several_stretches(seed: int) -> None:
    """As one does that lives across the end of a pass."""
    rng = random.Random(seed)
    items = [
        (64 * rng.randint(1, 9), sorted(rng.sample(range(20), rng.randint(1, 12))))
        for _ in range(25)
    ]
    placed = first_fit(items)
    for i, (nbytes, tasks) in enumerate(items):
        beside = [
            p for p, (_, others) in zip(placed, items[:i], strict=False) if {*tasks} & {*others}
        ]
        places = [Extent(at, nbytes) for at in sorted({0, *(p.end for p in beside)})]
        free = [place for place in places if not any(map(place.overlaps, beside))]
        assert placed[i] == free[0]  # the lowest


def test_nothing_needs_nothing() -> None:
    assert top_of(place([])) == 0


@pytest.mark.parametrize("seed", range(20))
def test_tenancy_agrees_with_a_byte_by_byte_account(seed: int) -> None:
    rng = random.Random(seed)
    tenancy, account = Tenancy(), [None] * 64
    for node in range(60):
        begin = rng.randint(0, 60)
        extent = Extent(begin, rng.randint(1, 64 - begin))
        expected = sorted({v for v in account[extent.offset : extent.end] if v is not None})
        assert tenancy.vacators(extent) == expected
        tenancy.free(extent, node)
        account[extent.offset : extent.end] = [node] * extent.nbytes


def test_a_gap_between_two_is_used_where_they_leave_just_enough() -> None:
    live = [
        LiveBuffer(0, 256, 0, 4),
        LiveBuffer(1, 192, 0, 1),
        LiveBuffer(2, 128, 0, 4),
        LiveBuffer(3, 192, 2, 3),
    ]
    assert top_of(place(live)) == 256 + 192 + 128


def test_the_largest_lie_lowest() -> None:
    live = [LiveBuffer(0, 64, 0, 2), LiveBuffer(1, 192, 0, 2), LiveBuffer(2, 128, 0, 2)]
    assert place(live) == {0: Extent(320, 64), 1: Extent(0, 192), 2: Extent(192, 128)}
