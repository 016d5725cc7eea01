"""A limit on the host memory of a run: what counts, what is refused, and what is intact then."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ds_finepage
from ds_finepage.api import attach
from ds_finepage.errors import ConfigError, PlanInfeasibleError
from ds_finepage.execution.host_memory import host_memory
from tests.integration.families import CACHE, make_model, token_ids

pytestmark = pytest.mark.usefixtures("fresh")

ROW_BYTES = 2 * 2 * 128 * 4
"""A token of the KV cache: keys and values of two layers."""


@pytest.fixture
def llama() -> Any:
    return make_model("llama", num_hidden_layers=2, num_key_value_heads=4)


def weights_of(model: Any) -> int:
    return sum(p.nbytes for p in model.parameters())


def on_host(model: Any, budget: int | str) -> Any:
    return attach(
        model, device_budget="60%weights", device="cpu", kv_cache="host", host_budget=budget
    )


def test_weights_above_the_budget_are_refused_with_both_numbers(llama: Any) -> None:
    need = weights_of(llama)
    with pytest.raises(ConfigError, match=f"take {need} bytes .* host_budget is {need - 1} bytes"):
        on_host(llama, need - 1)
    handle = on_host(llama, need)
    assert handle.stats.host_bytes == handle.stats.host_budget_bytes == need


def test_without_a_number_the_budget_is_what_is_free(llama: Any) -> None:
    handle = on_host(llama, "auto")
    (free, total), need = host_memory(), weights_of(llama)
    found = handle.stats.host_budget_bytes
    assert found is not None and need < found <= need + total
    assert found - need == pytest.approx(free - total // 32, rel=0.2)
    handle.detach()
    handle = on_host(llama, "50%host")
    assert handle.stats.host_budget_bytes == total // 2


def test_a_generation_beyond_the_budget_is_refused_before_its_first_token(llama: Any) -> None:
    budget = weights_of(llama) + 100 * ROW_BYTES
    handle = on_host(llama, budget)
    expected = llama.generate(token_ids(9), max_new_tokens=40, do_sample=False)
    num_captures = handle.stats.num_captures
    device_rows = handle.stats.budget_bytes // ROW_BYTES
    with pytest.raises(PlanInfeasibleError, match=r"are free within finepage\.host_budget"):
        llama.generate(token_ids(9), max_new_tokens=100 + device_rows, do_sample=False)
    assert handle.stats.num_captures == num_captures
    assert torch.equal(llama.generate(token_ids(9), max_new_tokens=40, do_sample=False), expected)


def test_a_cache_that_grows_beyond_the_budget_is_refused_and_keeps_its_rows(llama: Any) -> None:
    ids = token_ids(200)
    handle = on_host(llama, weights_of(llama) + 64 * ROW_BYTES)
    with torch.no_grad():
        cache, num_rows = llama(ids[:, :8], use_cache=True)[CACHE], 8
        with pytest.raises(PlanInfeasibleError, match=r"host_budget is \d+ bytes\. Raise "):
            while num_rows < 200:
                llama(ids[:, num_rows : num_rows + 8], use_cache=True, **{CACHE: cache})
                num_rows += 8
                stats = handle.stats
                assert stats.host_bytes <= stats.host_budget_bytes
        assert 8 < num_rows <= 64 and cache.get_seq_length() == num_rows
        handle.detach()
        found = llama(ids[:, num_rows:], use_cache=True, **{CACHE: cache}).logits
        expected = llama(ids).logits[:, num_rows:]
    torch.testing.assert_close(found, expected)


def test_weights_that_are_a_drafts_count_too(llama: Any) -> None:
    handle = attach(llama, device_budget="200%weights", device="cpu", weights_group=16)
    draft = make_model("llama", num_hidden_layers=1)
    handle.take_draft(ds_finepage.runtime.drafts.Draft(draft))
    assert handle.stats.host_bytes == weights_of(llama) + weights_of(draft)
    handle.take_draft(None)
    assert handle.stats.host_bytes == weights_of(llama)


def test_the_pinned_pool_counts(llama: Any) -> None:
    handle = on_host(llama, weights_of(llama) + (1 << 20))
    memory = handle._runner.memory
    memory._pool.reserve(1000)
    assert handle.stats.host_bytes == weights_of(llama) + 1000
    with pytest.raises(PlanInfeasibleError, match=f"{1 << 20} of them for what is not on the dev"):
        memory.require_host(1 << 20)
    memory.require_host((1 << 20) - 1000)
