"""Packed experts: equal to the same packed model, and only those that are chosen are brought in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_finepage.api import attach
from ds_finepage.graph.packed import PACKED_PRODUCTS
from ds_finepage.packing import op
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import pack_model
from ds_finepage.planning.rewrite import split
from ds_finepage.runtime.stats import PassStats
from tests.integration.families import SLOW_LINK, make_model, token_ids
from tests.integration.parity import results, same_within

PROMPT = token_ids(5)
NUM_EXPERTS, SHARES = 8, (0, 0.05, 0.3, 1)
EXPERTS = {"mixtral": {"num_local_experts": NUM_EXPERTS}, "qwen3_moe": {"num_experts": NUM_EXPERTS}}


pytestmark = [
    pytest.mark.usefixtures("fresh"),
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`"),
]


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "SLICE_ROWS", 32)  # so that a matrix has several slices
    monkeypatch.setattr(split, "CUT_ROWS", 32)


def packed_model(family: str, form: str, dtype: torch.dtype) -> Any:
    model = make_model(family, dtype, num_hidden_layers=1, **EXPERTS[family])
    assert "model.layers.0.mlp.experts" in pack_model(model, PackedForm.parse(form, 32))
    return model


@pytest.mark.parametrize(
    ("family", "form", "dtype", "is_split"),
    [("mixtral", "int8", torch.bfloat16, True), ("qwen3_moe", "int8", torch.float32, False)],
    ids=str,
)
def test_packed_experts_are_the_same_at_every_budget(
    family: str, form: str, dtype: torch.dtype, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = packed_model(family, form, dtype)
    plain = results(model, PROMPT)
    # Other products in slices are the same up to rounding only, so they stay whole.
    monkeypatch.setattr(split, "MATMULS", dict.fromkeys(PACKED_PRODUCTS, 1))
    handle = attach(model, device_budget="1GiB", device="cpu", profile=SLOW_LINK, split=is_split)
    assert all(map(torch.equal, results(model, PROMPT), plain))
    least, weight_bytes = handle.stats.min_budget_bytes, handle.stats.weight_bytes
    for seed, share in enumerate(SHARES):
        budget = int(least + share * weight_bytes)
        same_within(handle, lambda: results(model, PROMPT), plain, budget, seed)
        step: PassStats = max(handle.stats.passes, key=lambda p: p.num_runs)
        assert step.last_reloaded_bytes >= step.lower_bound_bytes
    assert not handle.stats.unplanned_reasons
