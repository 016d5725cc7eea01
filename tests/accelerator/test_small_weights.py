"""Weights of few bytes on an accelerator: their masters lie side by side, and are one copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ds_finepage
from ds_finepage.execution.device import device_of
from ds_finepage.execution.executor import Executor
from ds_finepage.execution.masters import SMALL_MASTER_BYTES, weights_of
from ds_finepage.execution.reload_sources import ReloadSources
from ds_finepage.graph.memgraph import NodeKind
from tests.accelerator.subjects import AMPLE
from tests.integration.families import SLOW_LINK
from tests.unit.execution.graphs import INPUT, Draft

NUM = 12


class Sums(nn.Module):
    """Each task reads two small weights."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(2048) for _ in range(NUM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(0, NUM, 2):
            x = torch.addcmul(self.parts[i], x, self.parts[i + 1])
        return x


def test_masters_of_small_weights_lie_side_by_side(device: torch.device) -> None:
    num_large = SMALL_MASTER_BYTES // 4 + 1
    module = nn.ParameterDict(
        {f"p{n}": torch.randn(n) for n in (100, 128, num_large, 200, num_large - 1)}
    )
    values = {name: p.detach().clone() for name, p in module.named_parameters()}
    weights = {w.name: w for w in weights_of(dict(module.named_parameters()), device)}
    for name, weight in weights.items():
        assert weight.master.is_pinned() and torch.equal(weight.value, values[name])
    large = weights.pop(f"p{num_large}")
    begins = [w.master.data_ptr() for w in weights.values()]
    assert [b - begins[0] for b in begins] == [0, 512, 1024, 2048]
    assert device_of(device).alignment == 512
    blocks = {w.master.untyped_storage().data_ptr() for w in weights.values()}
    assert len(blocks) == 1 and large.master.untyped_storage().data_ptr() not in blocks


def test_adjacent_weights_are_reloaded_by_one_copy(
    device: torch.device, card: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    model = Sums()
    given = torch.randn(2048)
    with torch.no_grad():
        expected = model(given)
    seen: list[Executor] = []
    run = Executor.run

    def noted(executor: Executor, *args: Any) -> Any:
        seen[:] = [executor]
        return run(executor, *args)

    monkeypatch.setattr(Executor, "run", noted)
    handle = ds_finepage.attach(model, device=device, device_budget=AMPLE, profile=SLOW_LINK)
    ours = given.to(device)
    with torch.no_grad():
        model(ours)
        handle.replan(budget_bytes=handle.stats.min_budget_bytes)
        for _ in range(3):
            assert torch.equal(model(ours).cpu(), expected)
        card.reset_counters()
        model(ours)
    (executor,) = seen
    reloads = [n for n in executor.memgraph.nodes if n.kind is NodeKind.RELOAD]
    assert 0 < card.counters()["h2d"] < len(reloads)
    handle.detach()
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert all(p.untyped_storage().nbytes() == 4 * p.numel() for p in model.parameters())
    with torch.no_grad():
        assert torch.equal(model(given), expected)


def test_indices_are_read_into_the_same_host_memory(device: torch.device) -> None:
    draft = Draft()
    ids = draft.tensor(INPUT, 1, 4, dtype="int64")
    sources = ReloadSources(draft.graph((ids,), ()), {}, pinned=True)
    found = []
    for numbers in ([[1, 2, 3, 4]], [[5, 6, 7, 8]], [[9]]):
        given = torch.tensor(numbers)
        assert sources._indices_of(ids.tensor, [given]) is given
        read = sources._indices_of(ids.tensor, [given.to(device)])
        assert read.is_cpu and torch.equal(read, given)
        found.append(read)
    assert found[0] is found[1]
