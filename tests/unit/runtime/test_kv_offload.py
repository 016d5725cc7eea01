"""A call without room is repeated: its cache gets less room, then it goes to host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.integrations.transformers.host_cache import HostLayer
from ds_finepage.integrations.transformers.preflight import CacheUse
from ds_finepage.integrations.transformers.room import MIN_ROWS, RoomLayer
from ds_finepage.runtime.kv_offload import CapturedCall, KVOffload
from ds_finepage.runtime.stats import Counters


@pytest.fixture(autouse=True)
def _captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers take calls for captured ones, whose new rows are settled afterwards."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


def rows(value: float, tokens: int = 3) -> torch.Tensor:
    """Make keys: one sequence, two heads, of width 4."""
    return torch.full((1, 2, tokens, 4), value)


def cache_with(*values: float) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(2):
        for value in values:
            cache.update(rows(value), -rows(value), layer)
    return cache


def forward(cache: DynamicCache, num_refusals: int = 0, after: int = 1) -> Callable[..., Any]:
    """Make a call that adds rows, and that at first finds no room behind some of the layers."""
    refusals = iter(range(num_refusals))

    def run(past_key_values: DynamicCache) -> torch.Tensor:
        refuses = next(refusals, None) is not None
        for layer in range(2):
            if refuses and layer == after:
                raise PlanInfeasibleError("no room")
            keys, _ = past_key_values.update(rows(9, 1), -rows(9, 1), layer)
        if refuses:
            raise PlanInfeasibleError("no room")
        return keys

    return run


def calls(**given: Any) -> tuple[KVOffload, Counters]:
    counters = Counters()
    return KVOffload(counters, **given), counters


def call(
    made: KVOffload,
    run: Callable[..., Any],
    cache: DynamicCache,
    *,
    may_move: bool = True,
    num_new: int = 1,
    **given: Any,
) -> Any:
    ids = torch.zeros(1, num_new, dtype=torch.long)

    def compiled(input_ids: torch.Tensor, past_key_values: DynamicCache) -> Any:
        return run(past_key_values)

    asked = CapturedCall(compiled, nn.Identity(), (), {"input_ids": ids, "past_key_values": cache})
    return made.call(asked, may_move=may_move, **given)


def lengths(cache: DynamicCache) -> list[int]:
    return [layer.get_seq_length() for layer in cache.layers]


EXPECTED = torch.cat([rows(5), rows(9, 1)], dim=-2)


def test_a_cache_that_starts_on_the_host_moves_once_and_is_never_on_the_device() -> None:
    made, counters = calls()
    cache = cache_with(5)
    seen: list[type] = []

    def run(cache: DynamicCache) -> torch.Tensor:
        seen.extend(type(layer) for layer in cache.layers)
        return forward(cache)(cache)

    for _ in range(2):
        call(made, run, cache, starts_on_host=True)
        assert counters.num_caches_on_host == 1
    assert set(seen) == {HostLayer}


@pytest.mark.parametrize("num_refusals", (0, 1))
def test_an_empty_cache_is_empty_before_the_next_call(num_refusals: int) -> None:
    made, counters = calls()
    cache = DynamicCache()
    assert torch.equal(call(made, forward(cache, num_refusals), cache), rows(9, 1))
    assert lengths(cache) == [1, 1]
    assert counters.num_caches_on_host == num_refusals


@pytest.mark.parametrize(("num_refusals", "after"), ((0, 1), (1, 0), (1, 1), (1, 2)))
def test_rows_of_a_refused_forward_are_taken_back_before_the_next(
    num_refusals: int, after: int
) -> None:
    """Behind a graph break some layers have added their rows already."""
    made, counters = calls()
    cache = cache_with(5)
    assert torch.equal(call(made, forward(cache, num_refusals, after), cache), EXPECTED)
    assert lengths(cache) == [4, 4]
    assert counters.num_caches_on_host == num_refusals
    for layer in cache.layers:
        assert type(layer) is DynamicLayer  # the caller's own, with rows in host memory
        assert torch.equal(layer.keys, EXPECTED)
        assert torch.equal(layer.values, -EXPECTED)


def test_a_refusal_leaves_the_cache_as_it_was() -> None:
    made, counters = calls()
    cache = cache_with(5)
    with pytest.raises(PlanInfeasibleError):
        call(made, forward(cache, 1), cache, may_move=False)
    assert lengths(cache) == [3, 3]
    assert counters.num_caches_on_host == 0
    assert torch.equal(cache.layers[0].keys, rows(5))


def test_a_second_refusal_is_passed_on_and_leaves_no_rows() -> None:
    made, counters = calls()
    cache = cache_with(5)
    with made.generation(CacheUse()):  # between whose steps the layers stay as they are
        with pytest.raises(PlanInfeasibleError):
            call(made, forward(cache, 2), cache)
        assert lengths(cache) == [3, 3]
        assert counters.num_caches_on_host == 1
        # What the refused forward has handed back is let go, and not settled by the next call.
        for layer in cache.layers:
            assert isinstance(layer, HostLayer)
            assert layer.new_keys is layer.new_values is None
        assert torch.equal(call(made, forward(cache), cache), EXPECTED)
        assert lengths(cache) == [4, 4]


# Room behind the rows.


def capacities(cache: DynamicCache) -> list[int]:
    return [layer.capacity for layer in cache.layers]  # type: ignore[union-attr]


def test_a_call_gives_rows_room_and_the_next_ones_write_behind_them() -> None:
    made, _ = calls()
    cache = cache_with(5)
    call(made, forward(cache), cache)
    held = [layer.keys for layer in cache.layers]  # so that nothing else comes to their places
    places = [keys.data_ptr() for keys in held]
    for _ in range(MIN_ROWS - 5):
        call(made, forward(cache), cache)
    assert [layer.keys.data_ptr() for layer in cache.layers] == places
    assert lengths(cache) == [MIN_ROWS - 1] * 2
    call(made, forward(cache), cache)  # one row always stays free
    assert not set(places) & {layer.keys.data_ptr() for layer in cache.layers}
    assert torch.equal(cache.layers[0].keys, torch.cat([rows(5), rows(9, MIN_ROWS - 3)], dim=2))


def test_a_generation_gives_as_much_room_as_it_needs() -> None:
    made, _ = calls()
    cache = cache_with(5)
    with made.generation(CacheUse(longest=5)):
        call(made, forward(cache), cache)
        assert capacities(cache) == [6, 6]
        call(made, forward(cache), cache)
        assert capacities(cache) == [6, 6]
        call(made, forward(cache), cache)  # it does not keep to its length
        assert capacities(cache) == [MIN_ROWS, MIN_ROWS]
    assert made.use == CacheUse()


def test_a_small_cache_gets_all_its_room_at_once() -> None:
    made, counters = calls()
    cache = cache_with(5)
    with made.generation(CacheUse(longest=200, is_made_at_once=True)):
        call(made, forward(cache), cache)
        assert capacities(cache) == [201, 201]
        call(made, forward(cache, 1), cache)
        assert counters.num_caches_on_host == 1


def test_the_cache_of_a_refused_call_moves() -> None:
    made, counters = calls()
    cache = cache_with(*range(300))
    with made.generation(CacheUse()):
        call(made, forward(cache), cache)
        assert (capacities(cache), counters.num_caches_on_host) == ([1024, 1024], 0)
        call(made, forward(cache, 1), cache)
        assert counters.num_caches_on_host == 1
    assert lengths(cache) == [902, 902]


def test_generations_at_the_same_time_pay_for_beams_if_one_has_some() -> None:
    made, _ = calls()
    with made.generation(CacheUse(longest=5)):
        with made.generation(CacheUse(longest=9, is_reordered=True)):
            assert made.use == CacheUse(longest=5, is_reordered=True)
        with made.generation(CacheUse()):
            assert made.use.is_reordered
    assert made.use == CacheUse()


def test_rows_wait_in_host_memory_where_two_rooms_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, ways = [], []
    resize = RoomLayer.resize

    def see(layer: RoomLayer, capacity: int, *, via_host: bool = False) -> None:
        ways.append(via_host)
        resize(layer, capacity, via_host=via_host)

    def make_room(rooms: Sequence[torch.Tensor], after: Sequence[int]) -> bool:
        asked.append((len(rooms), after))
        return len(asked) > 1

    monkeypatch.setattr(RoomLayer, "resize", see)
    made, _ = calls(make_room=make_room)
    room_bytes = MIN_ROWS * rows(5, 1).nbytes
    for _ in range(2):
        cache = cache_with(5)
        assert torch.equal(call(made, forward(cache), cache), EXPECTED)
    assert asked == [(4, [room_bytes] * 4)] * 2
    assert ways == [False, False, True, True]


def test_a_cache_whose_room_cannot_double_goes_to_host_memory_or_stays_as_it_was() -> None:
    def make_room(rooms: Sequence[torch.Tensor], after: Sequence[int]) -> bool:
        raise PlanInfeasibleError("no room for rows", 5)

    made, counters = calls(make_room=make_room)
    cache = cache_with(5)
    with pytest.raises(PlanInfeasibleError, match="no room for rows"):
        call(made, forward(cache), cache, may_move=False)
    assert lengths(cache) == [3, 3]
    assert torch.equal(cache.layers[0].keys, rows(5))
    assert torch.equal(call(made, forward(cache), cache), EXPECTED)
    assert counters.num_caches_on_host == 1


def test_rows_that_a_caller_gets_are_noted() -> None:
    noted: list[torch.Tensor] = []
    made, _ = calls(note_live=noted.extend)
    cache = cache_with(5)
    with made.generation(CacheUse()):
        call(made, forward(cache), cache)
        assert noted == []
    assert [id(tensor) for tensor in noted] == [
        id(tensor) for layer in cache.layers for tensor in (layer.keys, layer.values)
    ]


@pytest.mark.parametrize("error", (PlanInfeasibleError("no room"), RuntimeError("another")))
def test_a_call_without_a_cache_or_with_another_error_is_tried_once(error: Exception) -> None:
    made, counters = calls()
    has_cache = type(error) is RuntimeError
    tries = []

    def run(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise error

    given = {"past_key_values": cache_with(5)} if has_cache else {}
    with pytest.raises(type(error)):
        made.call(CapturedCall(run, nn.Identity(), (), given), may_move=True)
    assert (len(tries), counters.num_caches_on_host) == (1, 0)


def test_of_two_refusals_the_one_that_needs_less_is_told() -> None:
    made, _ = calls()
    needs = iter((50, 70))
    cache = cache_with(5)

    def run(past_key_values: DynamicCache) -> None:
        raise PlanInfeasibleError("no room", next(needs))

    with pytest.raises(PlanInfeasibleError) as caught:
        call(made, run, cache)
    assert caught.value.min_budget_bytes == 50


def asked_of(made: list[int], budget: int) -> Callable[[int], None]:
    """Note the bytes that are asked for, and refuse more than a budget has."""

    def require(nbytes: int) -> None:
        made.append(nbytes)
        if nbytes > budget:
            raise PlanInfeasibleError("host_budget")

    return require


def test_a_cache_moves_within_the_host_budget_or_stays_where_it_is() -> None:
    nbytes = 2 * 2 * rows(0).nbytes  # keys and values of two layers
    for budget in (1 << 20, nbytes - 1):
        asked: list[int] = []
        made, counters = calls(require_host=asked_of(asked, budget))
        cache = cache_with(1)
        if budget > nbytes:
            call(made, forward(cache, num_refusals=1), cache)
        else:
            with pytest.raises(PlanInfeasibleError, match="host_budget"):
                call(made, forward(cache, num_refusals=1), cache)
            assert torch.equal(cache.layers[0].keys, rows(1))
        assert asked[0] == nbytes
        assert counters.num_caches_on_host == (budget > nbytes)


def test_new_rows_in_host_memory_are_asked_for_before_they_are_there() -> None:
    asked: list[int] = []
    made, _ = calls(require_host=asked_of(asked, 1 << 20))
    cache = DynamicCache()
    call(made, forward(cache), cache, starts_on_host=True)
    assert asked == [0, made.host_bytes] and made.host_bytes > 0
    for _ in range(MIN_ROWS):
        before = made.host_bytes
        call(made, forward(cache), cache)
        if made.host_bytes > before:
            break
    more = made.host_bytes - before
    assert asked[2:] == [more + before // 2]  # a layer's old room is freed when its rows have moved
    del cache
    assert made.host_bytes == 0
