"""Lengths whose doubling has no room: few plans, and no capture for each token."""

from __future__ import annotations

import torch

from ds_finepage.api import attach
from tests.integration.families import make_model, token_ids, tokens


def test_lengths_that_fit_alone_are_neither_captured_nor_planned_one_by_one() -> None:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    model = make_model("llama", num_hidden_layers=2, intermediate_size=64)
    ids, num_tokens = token_ids(5, batch=16), 38
    plain = tokens(model, ids, num_tokens, cache=None)
    handle = attach(model, device_budget="64MiB", device="cpu")
    assert torch.equal(tokens(model, ids, num_tokens, cache=None), plain)
    assert handle.stats.num_captures == 2
    step = handle.stats.passes[-1]  # for 64 rows; the cache has 42 at its longest
    handle.replan(budget_bytes=step.min_budget_bytes - 200_000)
    num_plans = handle.stats.num_plans
    # The prefill's, and one for all steps while the cache has room for 16, 32 and 43 rows. The
    # passes share one arena, which the last of them makes smaller for the others.
    for num_more in (4, 3):
        assert torch.equal(tokens(model, ids, num_tokens, cache=None), plain)
        num_plans += num_more
        assert handle.stats.num_plans == num_plans
    assert handle.stats.num_captures == 2
    assert handle.stats.num_caches_on_host == handle.stats.num_unplanned_graphs == 0
    handle.detach()
