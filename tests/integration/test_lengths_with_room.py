"""Lengths whose doubling has no room: few plans, and no capture for each token."""

from __future__ import annotations

import pytest
import torch

from ds_finepage.api import attach
from tests.integration.families import make_model, token_ids, tokens

pytestmark = pytest.mark.usefixtures("fresh")


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
