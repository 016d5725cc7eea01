"""How few large pieces of the weights are chosen to stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ds_finepage.planning.finepage.grains import stream_in_grains
from ds_finepage.planning.rewrite.split import Divisible, quantum

ROW = 64
SIZE = 64 * ROW


def equal_weights(count: int) -> tuple[list[int], dict[int, int], dict[int, Divisible]]:
    weights = list(range(count))
    cut = {b: Divisible(buffer=b, num_rows=64, row_bytes=ROW, task=b) for b in weights}
    return weights, dict.fromkeys(weights, SIZE), cut


def test_a_large_grain_streams_whole_weights_evenly() -> None:
    weights, sizes, cut = equal_weights(8)
    found = stream_in_grains(weights, sizes, cut, 2 * SIZE, 10 * SIZE)
    assert [b for b, nbytes in found.items() if nbytes] == [3, 7]
    assert set(found.values()) == {0, SIZE}


def test_a_small_grain_streams_a_part_of_each() -> None:
    weights, sizes, cut = equal_weights(8)
    found = stream_in_grains(weights, sizes, cut, 2 * SIZE, ROW)
    assert set(found.values()) == {SIZE // 4}


def test_a_grain_between_streams_halves_of_every_other() -> None:
    weights, sizes, cut = equal_weights(8)
    found = stream_in_grains(weights, sizes, cut, 2 * SIZE, SIZE // 2)
    assert [found[b] for b in weights] == [0, SIZE // 2] * 4


def test_weights_stream_by_their_part_of_the_pass() -> None:
    weights, sizes, cut = equal_weights(4)
    pace = {0: 1, 1: 1, 2: 0, 3: 0}
    found = stream_in_grains(weights, sizes, cut, 2 * SIZE, SIZE // 2, pace=pace)
    assert [found[b] for b in weights] == [SIZE, SIZE, 0, 0]


def test_small_weights_are_kept_where_large_ones_have_enough_bytes() -> None:
    weights, sizes, cut = equal_weights(4)
    sizes[0] = sizes[2] = SIZE // 4
    for missing in (ROW, SIZE, 2 * SIZE, 2 * SIZE + 1):
        found = stream_in_grains(weights, sizes, cut, missing, SIZE // 2, keeps_small=True)
        assert sum(found.values()) >= missing
        assert (found[0] + found[2] > 0) is (missing > 2 * SIZE)
    pace = dict.fromkeys(weights, 1)
    found = stream_in_grains(weights, sizes, cut, SIZE, SIZE // 2, pace=pace)
    assert found[0] + found[2] > 0


def test_weights_that_cannot_be_cut_stream_whole() -> None:
    weights, sizes, _ = equal_weights(4)
    found = stream_in_grains(weights, sizes, {}, SIZE + 1, ROW)
    assert sorted(found.values()) == [0, 0, SIZE, SIZE]


def test_the_last_whole_weight_is_due_at_the_end_of_the_pass() -> None:
    weights, sizes, _ = equal_weights(12)
    found = stream_in_grains(weights, sizes, {}, 3 * SIZE - ROW, SIZE, keeps_small=True)
    assert [b for b, nbytes in found.items() if nbytes] == [3, 7, 11]


@given(st.data())
def test_enough_streams_whatever_the_sizes(data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=12))
    is_cut = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    sizes = {b: n * ROW for b, n in enumerate(rows)}
    cut = {
        b: Divisible(buffer=b, num_rows=n, row_bytes=ROW, task=b)
        for b, n in enumerate(rows)
        if is_cut[b]
    }
    total = sum(sizes.values())
    missing = data.draw(st.integers(0, total))
    grain_bytes = data.draw(st.integers(1, 2 * max(sizes.values())))
    found = stream_in_grains(list(sizes), sizes, cut, missing, grain_bytes)
    assert missing <= sum(found.values()) <= total
    for buffer, nbytes in found.items():
        if buffer not in cut:
            assert nbytes in (0, sizes[buffer])
        elif nbytes:
            assert (sizes[buffer] - nbytes) % (quantum(cut[buffer]) * ROW) == 0
