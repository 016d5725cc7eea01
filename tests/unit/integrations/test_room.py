"""Layers of a KV cache with room behind their rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.integrations.transformers.host_cache import HandedOut, move_to_host
from ds_finepage.integrations.transformers.room import (
    MIN_ROWS,
    RoomLayer,
    ample_rows,
    can_have_room,
    layers_of,
)


def rows(num_rows: int, seed: int = 0, batch: int = 2) -> torch.Tensor:
    """Make keys of two heads, each of width 4."""
    return torch.randn(batch, 2, num_rows, 4, generator=torch.Generator().manual_seed(seed))


def filled(num_rows: int, capacity: int, seed: int = 0) -> RoomLayer:
    layer = RoomLayer()
    layer.resize(capacity)
    layer.update(rows(num_rows, seed), -rows(num_rows, seed))
    return layer


def has(layer: DynamicLayer | RoomLayer, expected: torch.Tensor) -> bool:
    assert layer.keys is not None and layer.values is not None
    assert layer.get_seq_length() == expected.shape[2]
    return torch.equal(layer.keys, expected) and torch.equal(layer.values, -expected)


@pytest.fixture
def cache() -> Iterator[DynamicCache]:
    found = DynamicCache()
    for index in range(2):
        found.update(rows(5, index), -rows(5, index), index)
    yield found


def test_beams_reorder_a_room_that_inference_mode_has_made() -> None:
    with torch.inference_mode():
        layer = RoomLayer()
        layer.update(rows(5), -rows(5))
        layer.reorder_cache(torch.tensor([1, 0]))
        assert has(layer, rows(5)[[1, 0]])


def test_new_rows_are_written_behind_the_old_ones() -> None:
    layer = filled(5, 16)
    assert layer.key_room is not None and layer.key_room.shape[2] == 16
    place, before = layer.key_room.data_ptr(), layer.keys
    keys, values = layer.update(rows(1, 1), -rows(1, 1))
    expected = torch.cat([rows(5), rows(1, 1)], dim=2)
    assert torch.equal(keys, expected) and torch.equal(values, -expected)
    assert keys.data_ptr() == layer.key_room.data_ptr() == place
    assert has(layer, expected)
    assert before is not None and torch.equal(before, rows(5))


@pytest.mark.parametrize("via_host", [False, True])
def test_rows_move_to_a_larger_room(via_host: bool) -> None:
    layer = filled(5, 8)
    layer.resize(20, via_host=via_host)
    assert (layer.capacity, layer.room_bytes(20)) == (20, [2 * 2 * 20 * 4 * 4] * 2)
    assert has(layer, rows(5))
    layer.update(rows(14, 1), -rows(14, 1))
    assert has(layer, torch.cat([rows(5), rows(14, 1)], dim=2))


@pytest.mark.parametrize("via_host", [False, True])
def test_rows_that_wait_in_host_memory_have_no_two_rooms_at_once(via_host: bool) -> None:
    layer = filled(500, 501)
    with DeviceMeter(torch.device("cpu")) as meter:
        layer.resize(502)  # from now on the meter knows all rooms
        layer.resize(504, via_host=via_host)
    assert (meter.peak_bytes <= sum(layer.room_bytes(504))) is via_host
    assert has(layer, rows(500))


def test_more_rows_than_the_call_told_move_to_a_larger_room() -> None:
    layer = filled(5, 8)
    layer.update(rows(3, 1), -rows(3, 1))  # as many as there is room for, and none stays free
    assert has(layer, torch.cat([rows(5), rows(3, 1)], dim=2))
    assert layer.capacity == 9


def test_rows_of_a_failed_forward_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, empty = filled(5, 16), RoomLayer()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for made in (layer, empty):
        made.update(rows(2, 1), -rows(2, 1))
    assert (layer.get_seq_length(), empty.get_seq_length()) == (7, 2)
    for made in (layer, empty):
        made.forget_new()
        made.settle()
    assert has(layer, rows(5))
    assert empty.get_seq_length() == 0 and not empty.is_initialized
    layer.update(rows(1, 2), -rows(1, 2))
    layer.settle()
    assert has(layer, torch.cat([rows(5), rows(1, 2)], dim=2))


def test_a_cut_layer_keeps_its_room() -> None:
    layer = filled(5, 16)
    layer.crop(-2)
    assert layer.capacity == 16
    assert has(layer, rows(5)[:, :, :3])
    layer.update(rows(1, 1), -rows(1, 1))
    assert has(layer, torch.cat([rows(5)[:, :, :3], rows(1, 1)], dim=2))
    layer.reset()
    assert layer.get_seq_length() == 0 and layer.rooms == []


def test_fewer_sequences_of_a_layer_are_no_prefix_of_its_room() -> None:
    layer = filled(5, 16)
    assert layer.keys is not None and layer.values is not None
    layer.keys, layer.values = layer.keys[:1], layer.values[:1]
    assert has(layer, rows(5)[:1])


def test_sequences_are_chosen_as_transformers_chooses_them() -> None:
    layer, plain = filled(5, 16), DynamicLayer()
    plain.update(rows(5), -rows(5))
    for name, given in (
        ("reorder_cache", torch.tensor([1, 1])),
        ("batch_repeat_interleave", 3),
        ("reorder_cache", torch.tensor([5, 0, 2, 2, 1, 3])),
        ("batch_select_indices", torch.tensor([0, 4])),
    ):
        for made in (layer, plain):
            getattr(made, name)(given)
        assert plain.keys is not None
        assert has(layer, plain.keys)
    empty = RoomLayer()
    empty.reorder_cache(torch.tensor([0]))
    empty.batch_repeat_interleave(2)
    empty.batch_select_indices(torch.tensor([0]))
    assert empty.get_seq_length() == 0


def test_another_order_takes_a_part_of_the_rows() -> None:
    layer = filled(800, 801)
    with DeviceMeter(torch.device("cpu")) as meter:
        layer.reorder_cache(torch.tensor([1, 0]))
    assert 0 < meter.peak_bytes <= layer.room_bytes(800)[0] // 4 + 1024
    assert has(layer, rows(800)[[1, 0]])


def test_room_follows_the_length_of_a_generation() -> None:
    assert ample_rows(5, None) == MIN_ROWS
    assert [ample_rows(n, None) for n in (16, 1000, 1024)] == [32, 1024, 2048]
    assert [ample_rows(n, 1015) for n in (500, 1000, 1015, 1016)] == [512, 1016, 1016, 1024]
    for num_rows in range(1, 300):
        for longest in (None, 64, 299):
            assert num_rows < ample_rows(num_rows, longest)


def test_growth_copies_each_row_twice_at_most() -> None:
    num_copied = capacity = 0
    for num_rows in range(1, 5000):
        if num_rows >= capacity:
            num_copied += num_rows
            capacity = ample_rows(num_rows, None)
    assert num_copied <= 2 * 5000


# What callers see.


def taken(handed_out: HandedOut, cache: DynamicCache, capacity: int = 20) -> list[RoomLayer]:
    """Take the layers of a cache, and give them room for some rows."""
    handed_out.take(cache)
    found = layers_of([cache], RoomLayer)
    for layer in found:
        if layer.capacity < capacity:
            layer.resize(capacity)
    return found


def test_a_caller_gets_its_own_layers_back_and_rows_that_never_change(cache: DynamicCache) -> None:
    handed_out = HandedOut()
    own, seen = list(cache.layers), []
    for step in range(3):
        for layer in taken(handed_out, cache):
            layer.update(rows(1, 10 + step), -rows(1, 10 + step))
        given = handed_out.hand_out(cache)
        assert all(map(lambda a, b: a is b, cache.layers, own))
        seen.append((cache.layers[0].keys, cache.layers[0].keys.clone()))
    assert [type(layer) for layer in cache.layers] == [DynamicLayer] * 2
    assert seen[0][0].data_ptr() == seen[2][0].data_ptr()  # no step has copied the rows
    expected = torch.cat([rows(5), *(rows(1, 10 + step) for step in range(3))], dim=2)
    assert has(cache.layers[0], expected)
    assert all(torch.equal(rows, then) for rows, then in seen)
    pairs = [rows for layer in cache.layers for rows in (layer.keys, layer.values)]
    assert all(map(lambda a, b: a is b, given, pairs)) and len(given) == 4


def test_rows_in_host_memory_are_not_among_those_on_the_device(cache: DynamicCache) -> None:
    handed_out = HandedOut()
    handed_out.take(cache)
    assert move_to_host(cache)
    assert handed_out.hand_out(cache) == []
    assert has(cache.layers[0], rows(5))


def test_a_cache_that_its_caller_cut_gets_another_room(cache: DynamicCache) -> None:
    """So rows that the caller has seen, behind the cut, do not change."""
    handed_out = HandedOut()
    taken(handed_out, cache)
    handed_out.hand_out(cache)
    whole = cache.layers[0].keys
    cache.crop(-2)
    handed_out.take(cache)
    inside = layers_of([cache], RoomLayer)[0]
    assert inside.capacity == 3  # no room: the next call makes one
    inside.resize(8)
    inside.update(rows(2, 9), -rows(2, 9))
    handed_out.hand_out(cache)
    assert torch.equal(whole, rows(5))
    assert has(cache.layers[0], torch.cat([rows(5)[:, :, :3], rows(2, 9)], dim=2))


def test_while_the_model_runs_the_callers_layers_hold_no_rows(cache: DynamicCache) -> None:
    handed_out, own = HandedOut(), list(cache.layers)
    handed_out.take(cache)
    assert all(layer.keys is layer.values is None for layer in own)
    handed_out.hand_out(cache)
    assert has(own[0], rows(5))


def test_after_detaching_rows_have_no_room(cache: DynamicCache) -> None:
    handed_out = HandedOut()
    taken(handed_out, cache)
    handed_out.hand_out(cache)
    keys = cache.layers[0].keys
    assert keys is not None and keys.untyped_storage().nbytes() == 4 * keys.nbytes
    handed_out.bring_back()
    for layer in cache.layers:
        assert layer.keys.is_contiguous() and layer.values.is_contiguous()
        assert layer.keys.untyped_storage().nbytes() == layer.keys.nbytes
    assert has(cache.layers[0], rows(5))
    cache.update(rows(1, 9), -rows(1, 9), 0)
    assert has(cache.layers[0], torch.cat([rows(5), rows(1, 9)], dim=2))


def test_a_copy_of_a_cache_goes_its_own_way(cache: DynamicCache) -> None:
    handed_out = HandedOut()
    taken(handed_out, cache)
    handed_out.hand_out(cache)
    other = copy.deepcopy(cache)
    for made, seed in ((cache, 7), (other, 8)):
        for layer in taken(handed_out, made):
            layer.update(rows(1, seed), -rows(1, seed))
        handed_out.hand_out(made)
    for made, seed in ((cache, 7), (other, 8)):
        assert has(made.layers[0], torch.cat([rows(5), rows(1, seed)], dim=2))


def test_other_kinds_of_layers_have_no_room() -> None:
    plain = DynamicLayer()
    assert can_have_room(plain)
    plain.update(rows(3), rows(3))
    assert can_have_room(plain)
    window = DynamicSlidingWindowLayer(sliding_window=4)
    assert not can_have_room(window)
    odd = DynamicLayer()
    odd.update(rows(3)[0], rows(3)[0])
    assert not can_have_room(odd)  # three dimensions
    odd.keys = odd.values = torch.zeros(0)
    assert not can_have_room(odd)
    halves = DynamicLayer()
    halves.update(rows(3), rows(3))
    halves.values = rows(3).to(torch.bfloat16)
    assert not can_have_room(halves)
    cache = DynamicCache()
    cache.layers = [window, halves, plain]
    HandedOut().take(cache)
    assert [type(layer) for layer in cache.layers] == [
        DynamicSlidingWindowLayer,
        DynamicLayer,
        RoomLayer,
    ]


def test_a_layer_that_is_given_rows_has_their_dtype() -> None:
    layer = DynamicLayer()
    filled(5, 16).give(layer)
    assert has(layer, rows(5)) and vars(layer)["dtype"] is torch.float32
