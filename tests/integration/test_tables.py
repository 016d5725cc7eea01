"""Embedding tables that do not fit: the rows that a call looks up are brought in instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.planning.policies import PAGING
from ds_finepage.runtime.handle import Handle

WIDTH, NUM_ROWS = 32, 2048
TABLE_BYTES = 4 * WIDTH * NUM_ROWS
AMPLE = 4 * TABLE_BYTES


class Reader(nn.Module):
    """Looks rows up in one of the ways that models have, and multiplies them."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.table = nn.Embedding(NUM_ROWS, WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        weight = self.table.weight
        if self.kind == "a part of the table":
            rows = nn.functional.embedding(ids, weight[: NUM_ROWS // 2])
        elif self.kind == "indices changed in place":
            rows = nn.functional.embedding(ids.add_(1), weight)
        elif self.kind == "computed indices":
            rows = nn.functional.embedding(ids + 1, weight)
        else:
            rows = self.table(ids)
        found: torch.Tensor = self.layers(rows)
        return found @ weight.t() if self.kind == "tied" else found


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


@pytest.mark.parametrize("policy", sorted(PAGING))
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
    handle.detach()


@pytest.mark.parametrize("split", (False, True))
@pytest.mark.parametrize(
    "kind",
    ("a part of the table", "indices changed in place", "computed indices", "tied", "no index"),
)
def test_what_cannot_be_looked_up_beforehand(kind: str, split: bool) -> None:
    model = Reader(kind).eval()
    ids = indices(0, 0 if kind == "no index" else 2, 5)
    plain = call(model, ids)
    handle = attached(model, split=split)
    assert torch.equal(call(model, ids), plain)
    for budget_bytes in (handle.stats.min_budget_bytes, handle.stats.needed_budget_bytes - 64):
        handle.replan(budget_bytes=budget_bytes)
        for _ in range(2):
            found = call(model, ids)
            if split:  # products may be cut
                torch.testing.assert_close(found, plain)
            else:
                assert torch.equal(found, plain)
    assert handle.stats.num_unplanned_graphs == 0
    handle.detach()
