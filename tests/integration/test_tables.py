"""Embedding tables that do not fit: the rows that a call looks up are brought in instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.runtime.handle import Handle
from tests.unit.planning.sketches import PAGING

WIDTH, NUM_ROWS = 32, 2048
TABLE_BYTES = 4 * WIDTH * NUM_ROWS
AMPLE = 4 * TABLE_BYTES


class Reader(nn.Module):
    """Looks rows up, and multiplies them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(NUM_ROWS, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(self.table(ids))
        return found


def call(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(ids.clone())
    assert isinstance(found, torch.Tensor)
    return found


def indices(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(NUM_ROWS // 2, shape, generator=torch.Generator().manual_seed(seed))


def attached(model: nn.Module, **settings: Any) -> Handle:
    torch._dynamo.reset()
    return attach(model, **{"device_budget": AMPLE, "device": "cpu", **settings})


@pytest.mark.parametrize("policy", PAGING)
def test_a_table_larger_than_the_budget_takes_the_bytes_of_its_rows(policy: str) -> None:
    model = Reader().eval()
    calls = [indices(seed, 2, 5) for seed in range(3)] + [indices(9, 1, 1)]
    plain = [call(model, ids) for ids in calls]
    handle = attached(model, policy=policy)
    assert all(torch.equal(call(model, i), p) for i, p in zip(calls, plain, strict=True))
    stats = handle.stats
    assert stats.min_budget_bytes < TABLE_BYTES
    for budget_bytes in (stats.min_budget_bytes, TABLE_BYTES):
        debug = DebugConfig(poison_vacated=True, lane_delay_seed=1)
        handle.replan(budget_bytes=budget_bytes, debug=debug)
        for _ in range(2):
            assert all(torch.equal(call(model, i), p) for i, p in zip(calls, plain, strict=True))
    row_bytes = 4 * WIDTH
    assert row_bytes <= handle.stats.passes[1].last_reloaded_bytes < TABLE_BYTES
    handle.replan(budget_bytes=stats.min_budget_bytes - 64)
    with pytest.raises(PlanInfeasibleError, match="which makes min_budget_bytes"):
        call(model, calls[0])
    handle.detach()
    assert torch.equal(call(model, calls[0]), plain[0])


def test_rows_are_brought_in_as_soon_as_not_everything_fits() -> None:
    model, ids = Reader().eval(), indices(0, 2, 5)
    plain = call(model, ids)
    handle = attached(model)
    call(model, ids)
    handle.replan(budget_bytes=handle.stats.needed_budget_bytes - 64)
    for _ in range(2):
        assert torch.equal(call(model, ids), plain)
    (only,) = handle.stats.passes
    assert only.last_reloaded_bytes == ids.numel() * 4 * WIDTH  # the rest stays
    handle.replan(budget_bytes=handle.stats.needed_budget_bytes)
    for _ in range(2):
        assert torch.equal(call(model, ids), plain)
    assert handle.stats.passes[0].last_reloaded_bytes == 0
