"""``finepage.kv_cache: "host"``: the KV cache is in host memory from the first call on."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from ds_finepage.api import attach
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.integrations.transformers.preflight import Longest, kv_bytes
from ds_finepage.runtime.ranks import Ranks
from tests.integration.families import CACHE, WIDE_CACHE, greedy, make_model, token_ids

BUDGETS = ("60%weights", "64MiB")
"""Weights are paged, or all of them fit with the cache."""


pytestmark = pytest.mark.usefixtures("fresh")


def generated(model: Any) -> list[torch.Tensor]:
    ids = token_ids(40, batch=2)
    return [
        greedy(model, input_ids=ids, max_new_tokens=6),
        greedy(model, input_ids=ids, num_beams=2, max_new_tokens=6),
    ]


def stepped(model: Any, *, name: str = CACHE) -> list[torch.Tensor]:
    """Run a prompt and two steps with a cache of the caller."""
    cache, ids, found = DynamicCache(config=model.config), token_ids(9), []
    for _ in range(3):
        with torch.no_grad():
            logits = model(input_ids=ids, **{name: cache}, use_cache=True).logits
        found.append(logits)
        ids = logits[:, -1:].argmax(-1)
    return found


@pytest.mark.parametrize(("family", "budget"), [*zip(("llama", "gpt2"), BUDGETS, strict=True)])
def test_results_are_those_of_plain_transformers(family: str, budget: str) -> None:
    model = make_model(family)
    plain = [*generated(model), *stepped(model)]
    handle = attach(model, device_budget=budget, device="cpu", kv_cache="host")
    with DeviceMeter(torch.device("cpu")) as meter:
        found = [*generated(model), *stepped(model)]
    assert all(map(torch.equal, found, plain))
    assert handle.stats.num_caches_on_host >= 3
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0
    assert 0 < meter.peak_bytes <= handle.stats.budget_bytes


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_large_cache_competes_with_the_weights_from_the_start(is_whole: bool) -> None:
    """It is captured there alone. A part of a model does not know how large its cache is."""
    model, ids = make_model("llama", **WIDE_CACHE), token_ids(40)
    plain = greedy(model, input_ids=ids, max_new_tokens=6)
    ranks = type("SomeRanks", (Ranks,), {"has_whole_model": is_whole})()
    handle = attach(model, device_budget="60%weights", device="cpu", ranks=ranks)
    assert torch.equal(greedy(model, input_ids=ids, max_new_tokens=6), plain)
    assert handle.stats.num_caches_on_host == is_whole
    assert handle.stats.num_captures == 2
    step = handle.stats.passes[-1]
    assert 0 < step.last_reloaded_bytes <= 1.3 * step.lower_bound_bytes


def test_a_cache_that_stays_on_the_device_is_refused_where_it_has_no_room() -> None:
    model = make_model("llama", **WIDE_CACHE)
    cache_bytes = kv_bytes(model.config, model.dtype, Longest(6, 106, 100)) or 0
    handle = attach(model, device_budget=cache_bytes * 9 // 10, device="cpu", kv_cache="device")
    with pytest.raises(PlanInfeasibleError):
        greedy(model, input_ids=token_ids(100, batch=6), max_new_tokens=6)
    assert handle.stats.num_caches_on_host == 0


def test_a_policy_that_keeps_caches_on_the_device_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama", num_hidden_layers=1)
    with caplog.at_level(logging.WARNING):
        handle = attach(model, device_budget="64MiB", device="cpu", policy="lru", kv_cache="host")
    message = "finepage.kv_cache has no effect: policy lru keeps the KV cache on the device"
    assert message in caplog.messages
    greedy(model, input_ids=token_ids(8), max_new_tokens=2)
    assert handle.stats.num_caches_on_host == 0


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
def test_a_cache_may_have_its_older_name() -> None:
    model = make_model("llama")
    plain = stepped(model)
    handle = attach(model, device_budget="60%weights", device="cpu", kv_cache="host")
    assert all(map(torch.equal, stepped(model, name="past_key_values"), plain))
    assert handle.stats.num_caches_on_host > 0
