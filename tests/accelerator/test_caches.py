"""KV caches on the device, static ones, and those without room there, on an accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ds_finepage
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.graph.taskgraph import JOIN
from ds_finepage.integrations.transformers import room
from ds_finepage.integrations.transformers.preflight import Longest, kv_bytes
from tests.accelerator.subjects import AMPLE, attached, plain_on, subject
from tests.accelerator.test_passes import waits_of
from tests.device import loading
from tests.integration.batching import llama, tokens_of
from tests.integration.families import (
    CACHE,
    LAST,
    WIDE_CACHE,
    greedy,
    logits,
    make_model,
    prompt_and_steps,
    token_ids,
    tokens,
)
from tests.integration.parity import only_cut_plans

BATCH, LENGTH, NEW = 4, 60, 4
ARGUMENTS_DELAY_NS = 300_000


def test_a_cache_larger_than_the_budget_goes_to_host_memory(device: torch.device) -> None:
    model = make_model("llama", **WIDE_CACHE)
    ids = token_ids(LENGTH, batch=BATCH)
    plain = greedy(
        model.to(plain_on(device)), input_ids=ids.to(plain_on(device)), max_new_tokens=NEW
    ).cpu()
    cache_bytes = kv_bytes(model.config, model.dtype, Longest(BATCH, LENGTH + NEW, LENGTH))
    assert cache_bytes is not None
    handle = attached(model.to("cpu"), device, device_budget=cache_bytes * 19 // 20)
    for seed in (None, 1):
        handle.replan(debug=ds_finepage.config.DebugConfig(lane_delay_seed=seed))
        with DeviceMeter(device) as meter:
            found = greedy(model, input_ids=ids.to(device), max_new_tokens=NEW)
        assert torch.equal(found.cpu(), plain)
        assert 0 < meter.peak_bytes <= handle.stats.budget_bytes < cache_bytes
    assert handle.stats.num_caches_on_host == 2
    assert not handle.stats.unplanned_reasons


def test_a_decode_step_with_its_cache_in_host_memory_waits_behind_the_pass(
    device: torch.device, card: Any
) -> None:
    """For the rows of the embedding before the pass, and for each layer's new rows after it."""
    model = make_model("llama", **WIDE_CACHE)
    longest = Longest(BATCH, LENGTH + 2 * NEW, LENGTH)
    cache_bytes = kv_bytes(model.config, model.dtype, longest)
    assert cache_bytes is not None
    handle = attached(model, device, device_budget=cache_bytes * 9 // 10)
    new = token_ids(1, batch=BATCH).to(device)
    with torch.no_grad():
        cache = model(token_ids(LENGTH, batch=BATCH).to(device), **LAST)[CACHE]
        for _ in range(NEW):
            model(new, **{CACHE: cache}, **LAST)
        found = waits_of(card, lambda: model(new, **{CACHE: cache}, **LAST))
    assert handle.stats.num_caches_on_host == 1
    assert found == {"gather_rows": 1, "settle": WIDE_CACHE["num_hidden_layers"]}


def test_continuous_batching_holds_the_budget_and_waits_for_its_arguments(
    device: torch.device,
) -> None:
    """Transformers writes them on the default stream, and calls the model on another one."""
    torch._dynamo.reset()
    model = llama()
    expected = tokens_of(model.to(plain_on(device)), num_blocks=64)
    handle = attached(model.to("cpu"), device, device_budget="90%weights")
    if device.type == loading.NAME:
        card = torch.get_device_module(device)
        card.set_stream_delay(card.default_stream(device), ARGUMENTS_DELAY_NS)
    with DeviceMeter(device) as meter:
        assert tokens_of(model) == expected
    if device.type == loading.NAME:
        card.reset_switches()
    assert 0 < meter.peak_bytes <= handle.stats.budget_bytes
    assert not handle.stats.unplanned_reasons


def test_rows_of_a_prompt_wait_in_host_memory_while_they_move(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[torch.Tensor] = []
    keep = room.kept_on_host
    monkeypatch.setattr(room, "kept_on_host", lambda rows: kept.append(keep(rows)) or kept[-1])
    model = make_model("llama", hidden_size=256)
    plain = prompt_and_steps(model.to(plain_on(device)), plain_on(device)).cpu()
    handle = attached(model.to("cpu"), device, device_budget="60%weights")
    for seed in (None, 1, 2):
        handle.replan(debug=ds_finepage.config.DebugConfig(lane_delay_seed=seed))
        for _ in range(3):
            assert torch.equal(prompt_and_steps(model, device).cpu(), plain)
    assert kept and all(rows.device.type == "cpu" for rows in kept)


@only_cut_plans()
def test_weights_that_are_cut_and_a_static_cache(device: torch.device) -> None:
    """A cut may change the last bit of a sum, but each run gives the same bits."""
    torch._dynamo.reset()
    found = subject(device, "llama", split=True)
    found.at(AMPLE)
    static = tokens(found.model, found.ids, 4)
    found.at(found.budgets[1])
    cut = logits(found.model, found.ids)
    torch.testing.assert_close(cut.cpu(), found.logits, rtol=0, atol=1e-6)
    for seed in (0, 1):
        found.at(found.budgets[1], seed=seed)
        with DeviceMeter(device) as meter:
            assert torch.equal(logits(found.model, found.ids), cut)
            assert torch.equal(found.generate().cpu(), found.tokens)
            assert torch.equal(tokens(found.model, found.ids, 4), static)
        assert meter.peak_bytes <= found.budgets[1]
    assert any(t.op == JOIN for m, _ in found.handle.plans() for t in m.graph.tasks)
    found.detach()
