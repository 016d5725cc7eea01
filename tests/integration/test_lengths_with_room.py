"""Lengths whose doubling has no room: few plans, and no capture for each token."""

from __future__ import annotations

import torch

from ds_finepage.api import attach
from tests.integration.families import make_model, token_ids, tokens


def test_lengths_that_fit_alone_are_neither_captured_nor_planned_one_by_one() -> None:
    torch.set_num_threads(1)
    torch._dynamo.reset()
    model = make_model("llama", num_hidden_layers=2, intermediate_size=64)
    ids, num_tokens = token_ids(35, batch=16), 8
    plain = tokens(model, ids, num_tokens, cache=None)
    handle = attach(model, device_budget="64MiB", device="cpu")
    assert torch.equal(tokens(model, ids, num_tokens, cache=None), plain)
    assert handle.stats.num_captures == 2
    _, step = handle.stats.passes  # for 64 rows
    handle.replan(budget_bytes=step.min_budget_bytes - 400_000)
    num_plans = handle.stats.num_plans
    for _ in range(2):
        assert torch.equal(tokens(model, ids, num_tokens, cache=None), plain)
    assert handle.stats.num_captures == 2
    assert handle.stats.num_plans == num_plans + 2  # the prefill's, and one for all steps
    assert handle.stats.num_caches_on_host == handle.stats.num_unplanned_graphs == 0
    handle.detach()
