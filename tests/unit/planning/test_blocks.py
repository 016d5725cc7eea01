"""The block list: which bytes a new owner gets, and whom it has to wait for."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ds_finepage.graph.memgraph import Extent
from ds_finepage.planning.blocks import NEVER_USED, Block, BlockList

FREE = None


def filled(*sizes: int) -> BlockList:
    """Build an arena that buffers 0, 1, 2, ... of these sizes fill entirely."""
    blocks = BlockList(sum(sizes))
    for buffer, nbytes in enumerate(sizes):
        assert blocks.alloc(buffer, nbytes) is not None
    return blocks


def freed(sizes: list[int], vacators: list[int | None]) -> BlockList:
    """Build a filled arena and free the blocks that have a vacator."""
    blocks = filled(*sizes)
    for buffer, vacator in enumerate(vacators):
        if vacator is not None:
            blocks.free(buffer, vacator)
    return blocks


def layout(blocks: BlockList) -> list[tuple[int, int, int | None]]:
    return [(b.offset, b.nbytes, b.buffer) for b in blocks]


# --- plain allocation ------------------------------------------------------------------------


def test_an_arena_begins_as_one_free_block() -> None:
    assert list(BlockList(256)) == [Block(0, 256, FREE, NEVER_USED)]


@pytest.mark.parametrize("arena_bytes", [0, -64])
def test_no_arena_has_no_block(arena_bytes: int) -> None:
    blocks = BlockList(arena_bytes)
    assert list(blocks) == []
    assert blocks.alloc(0, 64) is None
    assert blocks.best_window(64, lambda b: 0) is None


def test_what_is_left_of_a_block_stays_free() -> None:
    blocks = BlockList(256)
    blocks.alloc(7, 64)
    assert layout(blocks) == [(0, 64, 7), (64, 192, FREE)]


def test_too_large_is_refused_and_changes_nothing() -> None:
    blocks = freed([64, 64, 64], [1, None, 2])
    before = list(blocks)
    assert blocks.alloc(9, 128) is None  # 128 bytes are free, but not in a row
    assert list(blocks) == before


def test_freed_neighbours_are_not_merged() -> None:
    blocks = freed([64, 64], [5, 4])
    assert list(blocks) == [Block(0, 64, FREE, 5), Block(64, 64, FREE, 4)]


def test_freeing_a_buffer_without_a_block_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="buffer 3 owns no block"):
        filled(64).free(3, 1)


def test_the_rest_of_a_run_keeps_the_stamp_of_its_last_block() -> None:
    blocks = freed([64, 128], [3, 8])
    blocks.alloc(9, 128)
    assert list(blocks)[-1] == Block(128, 64, FREE, 8)


# --- a given place ---------------------------------------------------------------------------


def test_alloc_at_splits_a_free_block_on_both_sides() -> None:
    blocks = freed([256], [6])
    assert blocks.alloc_at(9, Extent(64, 128)) == [6]
    assert list(blocks) == [Block(0, 64, FREE, 6), Block(64, 128, 9), Block(192, 64, FREE, 6)]


def test_alloc_at_spans_blocks_and_returns_their_vacators() -> None:
    blocks = freed([64, 64, 64], [9, 2, NEVER_USED])
    assert blocks.alloc_at(9, Extent(0, 192)) == [2, 9]


def test_alloc_at_leaves_earlier_blocks_alone() -> None:
    blocks = freed([64, 64], [None, 2])
    assert blocks.alloc_at(9, Extent(64, 64)) == [2]
    assert layout(blocks) == [(0, 64, 0), (64, 64, 9)]


@pytest.mark.parametrize("offset", [0, 64, 128])
def test_alloc_at_over_an_owner_is_our_own_mistake(offset: int) -> None:
    blocks = filled(128, 64)
    with pytest.raises(AssertionError):
        blocks.alloc_at(9, Extent(offset, 64))
    assert layout(blocks) == [(0, 128, 0), (128, 64, 1)]


def test_a_copy_goes_its_own_way() -> None:
    blocks = freed([64, 64, 64], [None, 3, None])
    before = list(blocks)
    trial = blocks.copy()
    assert trial.alloc(9, 64) is not None
    trial.free(0, 11)
    assert list(trial) != before == list(blocks)


# --- windows of victims ----------------------------------------------------------------------


def test_victims_come_by_ascending_address() -> None:
    blocks = BlockList(192)
    for buffer, offset in ((5, 128), (9, 0), (2, 64)):
        blocks.alloc_at(buffer, Extent(offset, 64))
    assert blocks.best_window(192, lambda b: 1) == [9, 2, 5]


def test_choosing_a_window_changes_nothing() -> None:
    blocks = filled(64, 64)
    before = list(blocks)
    blocks.best_window(64, lambda b: 1)
    assert list(blocks) == before


# --- against a plain reading of the rules ----------------------------------------------------


def runs(blocks: list[Block], nbytes: int, allowed: Callable[[Block], bool]) -> list[list[Block]]:
    """From each start, the shortest run of allowed blocks that is large enough."""
    found = []
    for first in range(len(blocks)):
        run: list[Block] = []
        for block in blocks[first:]:
            if not allowed(block):
                break
            run.append(block)
            if sum(b.nbytes for b in run) >= nbytes:
                found.append(run)
                break
    return found


def random_arena(draw: random.Random) -> BlockList:
    sizes = [64 * draw.randint(1, 4) for _ in range(draw.randint(1, 9))]
    return freed(sizes, [draw.choice([None, NEVER_USED, draw.randint(0, 9)]) for _ in sizes])


@pytest.mark.parametrize("seed", range(40))
def test_alloc_takes_the_oldest_of_all_runs(seed: int) -> None:
    draw = random.Random(seed)
    blocks, nbytes = random_arena(draw), 64 * draw.randint(1, 6)
    possible = runs(list(blocks), nbytes, lambda b: b.buffer is None)
    found = blocks.alloc(99, nbytes)
    if not possible:
        assert found is None
        return
    best = min(possible, key=lambda run: max(b.vacator for b in run))  # the first on ties
    vacators = sorted({b.vacator for b in best} - {NEVER_USED})
    assert found == (Extent(best[0].offset, nbytes), vacators)


@pytest.mark.parametrize("seed", range(40))
def test_best_window_is_the_best_of_all_runs(seed: int) -> None:
    draw = random.Random(seed)
    blocks, nbytes = random_arena(draw), 64 * draw.randint(1, 6)
    next_use = {b.buffer: draw.choice([None, 0.0, 1.0, 2.0, float("inf")]) for b in blocks}
    possible = runs(
        list(blocks), nbytes, lambda b: b.buffer is None or next_use[b.buffer] is not None
    )

    def score(run: list[Block]) -> float:
        soonest = [next_use[b.buffer] for b in run if b.buffer is not None]
        return min((s for s in soonest if s is not None), default=float("inf"))

    found = blocks.best_window(nbytes, next_use.get)
    if not possible:
        assert found is None
        return
    best = max(possible, key=score)
    assert found == [b.buffer for b in best if b.buffer is not None]


@pytest.mark.parametrize("seed", range(10))
def test_blocks_always_cover_the_arena(seed: int) -> None:
    draw = random.Random(seed)
    blocks, owners = BlockList(64 * 16), []
    for step in range(60):
        if owners and draw.random() < 0.5:
            blocks.free(owners.pop(draw.randrange(len(owners))), step)
        elif blocks.alloc(step, 64 * draw.randint(1, 5)) is not None:
            owners.append(step)
        end = 0
        for block in blocks:
            assert block.offset == end and block.nbytes > 0
            end += block.nbytes
        assert end == 64 * 16
        assert sorted(owners) == sorted(b.buffer for b in blocks if b.buffer is not None)


def test_bytes_that_were_never_used_come_first_at_any_address() -> None:
    blocks = BlockList(256)
    blocks.alloc(0, 64)
    blocks.alloc(1, 64)
    blocks.free(0, 1)
    assert blocks.alloc(2, 64) == (Extent(128, 64), [])
