"""An attached model whose parameters are tensor subclasses: by plan, and back as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_finepage.api import attach
from ds_finepage.errors import ConfigError
from tests.unit.execution.packed import Packed, packed_linear

X = torch.linspace(-1, 1, 512).reshape(2, 256)


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(packed_linear(256, 512), nn.ReLU(), packed_linear(512, 256))


def test_packed_weights_are_paged_and_come_back() -> None:
    model = two_layers()
    before = model[0].weight
    with torch.no_grad():
        expected = model(X)
        handle = attach(model, device_budget="1GiB", device="cpu")
        assert torch.equal(model(X), expected)
        handle.replan(budget_bytes=handle.stats.min_budget_bytes)
        assert torch.equal(model(X), expected)
    assert handle.stats.num_unplanned_graphs == 0
    assert {p.name for p in handle.plans()[0][0].graph.buffers} >= {"0.weight_numbers"}
    handle.detach()
    assert model[0].weight is before and isinstance(before, Packed)
    assert type(model[0]) is nn.Linear


def test_a_refused_attach_leaves_the_model_as_it_was() -> None:
    model = two_layers()
    with pytest.raises(ConfigError, match="device_budget"):
        attach(model, device_budget=1 << 60, device="cpu")
    assert type(model[0]) is nn.Linear and isinstance(model[0].weight, Packed)


def test_a_packed_layer_that_comes_later_is_taken_apart() -> None:
    model = two_layers()
    handle = attach(model, device_budget="1GiB", device="cpu")
    model.append(packed_linear(256, 8))
    with torch.no_grad():
        found = model(X)
    assert "3.weight_numbers" in dict(model.named_parameters())
    handle.detach()
    with torch.no_grad():
        assert torch.equal(model(X), found)
