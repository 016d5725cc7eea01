"""KV caches with room behind their rows give the plain results, whatever callers do with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ds_finepage.api import attach
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.runtime.handle import Handle
from tests.integration.families import CACHE, LAST, greedy, make_model, token_ids, tokens

pytestmark = pytest.mark.usefixtures("fresh")

SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@contextmanager
def attached(model: Any, work: Callable[[Any], Any]) -> Iterator[Handle]:
    """Attach a model under the least budget of some work; everything is planned."""
    handle = attach(model, device_budget="64MiB", device="cpu")
    work(model)
    handle.replan(budget_bytes=handle.stats.min_budget_bytes)
    yield handle
    assert handle.stats.num_caches_on_host == handle.stats.num_unplanned_graphs == 0


def step(model: Any, cache: Any, seed: int, num_new: int = 1) -> torch.Tensor:
    ids = token_ids(num_new, batch=2, seed=seed)
    return model(ids, **{CACHE: cache}, **LAST).logits


def two_chats(model: Any) -> list[torch.Tensor]:
    """Let two chats take turns; their callers keep, cut, copy and put into order what they get."""
    found, kept = [], []
    with torch.no_grad():
        mine, other = DynamicCache(config=model.config), DynamicCache()
        found += [step(model, mine, 1, 20), step(model, other, 2, 9)]
        for seed in range(3):
            found += [step(model, mine, 3 + seed), step(model, other, 6 + seed)]
            rows = [rows for layer in mine.layers for rows in (layer.keys, layer.values)]
            kept += [(tensor, tensor.clone()) for tensor in rows]
        assert all(type(layer) is DynamicLayer for layer in (*mine.layers, *other.layers))
        twin = copy.deepcopy(mine)
        mine.crop(-4)
        other.reorder_cache(torch.tensor([1, 0]))
        for cache in (mine, other, twin):
            found += [step(model, cache, 20 + seed) for seed in range(2)]
        mine.batch_repeat_interleave(2)
        mine.batch_select_indices(torch.tensor([0, 3]))
        found += [step(model, mine, 30), step(model, other, 31, 20)]
        mine.reset()
        found += [step(model, mine, 32, 5)]
    # No row that a caller has seen has changed.
    assert all(torch.equal(rows, then) for rows, then in kept)
    return found


def test_two_chats_take_turns_and_callers_change_their_caches() -> None:
    model = make_model("llama", num_hidden_layers=1)
    plain = two_chats(model)
    with attached(model, two_chats) as handle:
        handle.replan(budget_bytes=handle.stats.min_budget_bytes * 3 // 2)
        assert all(map(torch.equal, two_chats(model), plain))


def gemma3() -> Any:
    kinds = ["sliding_attention", "full_attention"]
    config = hf.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=8, layer_types=kinds)
    return hf.Gemma3ForCausalLM(config)


def lfm2() -> Any:
    config = hf.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])
    return hf.Lfm2ForCausalLM(config)


@pytest.mark.parametrize(("make", "settings"), [(gemma3, {"num_beams": 3}), (lfm2, {})])
def test_layers_of_other_kinds_are_beside_those_with_room(
    make: Callable[[], Any], settings: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None

    def work(module: Any) -> torch.Tensor:
        ids = token_ids(12, batch=2) % 256
        return greedy(module, input_ids=ids, max_new_tokens=20, **settings)

    plain = work(model)
    with attached(model, work) as handle:
        with DeviceMeter(torch.device("cpu")) as meter:
            assert torch.equal(work(model), plain)
        assert 0 < meter.peak_bytes <= handle.stats.budget_bytes


# Lengths whose doubling has no room: few plans, and no capture for each token.


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "less", "num_plans"),
    [
        # The prefill's, and one for all steps; then the prefill leaves room for the steps' weights.
        (35, 8, 200_000, [2, 1, 0, 0]),
        # The prefill's, and one for all steps while the cache has room for 16, 32 and 43 rows. The
        # passes share one arena, which the last of them makes smaller for the others.
        (5, 38, 200_000, [4, 2, 0, 0]),
    ],
)
def test_lengths_that_fit_alone_are_neither_captured_nor_planned_one_by_one(
    prompt: int, num_tokens: int, less: int, num_plans: list[int]
) -> None:
    model = make_model("llama", num_hidden_layers=2, intermediate_size=64)
    ids = token_ids(prompt, batch=16)
    plain = tokens(model, ids, num_tokens, cache=None)
    handle = attach(model, device_budget="64MiB", device="cpu", kv_cache="device")
    assert torch.equal(tokens(model, ids, num_tokens, cache=None), plain)
    assert handle.stats.num_captures == 2
    # The largest pass is for 64 rows; the cache has 42 at its longest.
    handle.replan(budget_bytes=handle.stats.min_budget_bytes - less)
    for num_more in num_plans:
        before = handle.stats.num_plans
        assert torch.equal(tokens(model, ids, num_tokens, cache=None), plain)
        assert handle.stats.num_plans == before + num_more
    assert handle.stats.num_captures == 2
    assert handle.stats.num_caches_on_host == handle.stats.num_unplanned_graphs == 0
