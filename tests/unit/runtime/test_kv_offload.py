"""A call that has no room: its cache goes to host memory and the call is run once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.cache_utils import DynamicCache, DynamicLayer

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.integrations.transformers.host_cache import HostLayer
from ds_finepage.runtime.captured_call import CapturedCall
from ds_finepage.runtime.kv_offload import KVOffload
from ds_finepage.runtime.stats import Counters


@pytest.fixture(autouse=True)
def _captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers in host memory take calls for captured ones, which hand new rows back."""
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


def calls() -> tuple[KVOffload, Counters]:
    counters = Counters()
    return KVOffload(counters, pinned=False), counters


def call(
    made: KVOffload, run: Callable[..., Any], cache: DynamicCache, *, may_move: bool = True
) -> Any:
    asked = CapturedCall(run, nn.Identity(), (), {"past_key_values": cache})
    return made.call(asked, may_move=may_move)


def lengths(cache: DynamicCache) -> list[int]:
    return [layer.get_seq_length() for layer in cache.layers]


EXPECTED = torch.cat([rows(5), rows(9, 1)], dim=-2)


def test_a_call_with_room_leaves_the_cache_where_it_is() -> None:
    made, counters = calls()
    cache = cache_with(5)
    assert torch.equal(call(made, forward(cache), cache), EXPECTED)
    assert lengths(cache) == [4, 4]
    assert counters.num_caches_on_host == 0


@pytest.mark.parametrize("after", (0, 1, 2))
def test_rows_of_a_refused_forward_are_taken_back_before_the_next(after: int) -> None:
    """Behind a graph break some layers have added their rows already."""
    made, counters = calls()
    cache = cache_with(5)
    assert torch.equal(call(made, forward(cache, 1, after), cache), EXPECTED)
    assert lengths(cache) == [4, 4]
    assert counters.num_caches_on_host == 1
    for layer in cache.layers:
        assert type(layer) is DynamicLayer  # the caller's own, with rows in host memory
        assert torch.equal(layer.keys, EXPECTED)
        assert torch.equal(layer.values, -EXPECTED)


def test_an_empty_cache_is_empty_again_before_the_next() -> None:
    made, counters = calls()
    cache = DynamicCache()
    assert torch.equal(call(made, forward(cache, 1), cache), rows(9, 1))
    assert lengths(cache) == [1, 1]
    assert counters.num_caches_on_host == 1


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
    with made.generation():  # between whose steps the layers stay as they are
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


def test_a_call_without_a_cache_is_refused_once() -> None:
    made, counters = calls()
    tries = []

    def run() -> None:
        tries.append(1)
        raise PlanInfeasibleError("no room")

    with pytest.raises(PlanInfeasibleError):
        made.call(CapturedCall(run, nn.Identity(), (), {}), may_move=True)
    assert len(tries) == 1
    assert counters.num_caches_on_host == 0


def test_other_errors_are_not_tried_again() -> None:
    made, _ = calls()
    cache, tries = cache_with(5), []

    def run(past_key_values: DynamicCache) -> None:
        tries.append(1)
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        call(made, run, cache)
    assert len(tries) == 1
