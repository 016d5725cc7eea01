"""Layers that unpack their weights themselves: equal, and never more than a slice is unpacked."""

from __future__ import annotations

import pytest
import torch

import ds_finepage
from ds_finepage.execution.device import default_device
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.graph.taskgraph import JOIN
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import pack_model
from tests.integration.families import logits, make_model, token_ids, tokens

IDS = token_ids(9)
GROUP = 32


class Int4Linear(torch.nn.Module):
    """Two numbers in a byte, with a scale and a minimum for each group."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.out_features = linear.out_features
        groups = linear.weight.detach().unflatten(1, (-1, GROUP)).float()
        least, most = groups.aminmax(dim=-1, keepdim=True)
        numbers = ((groups - least) / (most - least) * 15).round().to(torch.uint8).flatten(1)
        dtype = linear.weight.dtype
        self.numbers = _parameter(numbers[:, ::2] | numbers[:, 1::2] << 4)
        self.scales = _parameter(((most - least) / 15).to(dtype))
        self.minima = _parameter(least.to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.stack((self.numbers & 15, self.numbers >> 4), -1)
        grouped = both.view(self.out_features, -1, GROUP).to(x.dtype)
        weight = (grouped * self.scales + self.minima).view(self.out_features, -1)
        return torch.nn.functional.linear(x, weight)


def _parameter(value: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(value, requires_grad=False)


def unpacking_model() -> torch.nn.Module:
    model = make_model("llama", hidden_size=128, intermediate_size=256, dtype=torch.bfloat16)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and name != "lm_head":
                setattr(parent, name, Int4Linear(child))
    return model


def packed_model() -> torch.nn.Module:
    model = make_model("llama", hidden_size=128, intermediate_size=640, dtype=torch.bfloat16)
    pack_model(model, PackedForm.parse("int4", GROUP))
    return model


@pytest.mark.parametrize(
    ("make", "split"),
    [(unpacking_model, False), (packed_model, True)],
    ids=["by hand", "by the op"],
)
def test_tokens_are_those_of_the_same_model_within_any_budget(make: object, split: bool) -> None:
    model = make()  # type: ignore[operator]
    expected, generated = logits(model, IDS), tokens(model, IDS, 3, cache=None)
    handle = ds_finepage.attach(model, device_budget="64MiB", split=split)
    assert torch.equal(logits(model, IDS), expected)
    assert torch.equal(tokens(model, IDS, 3, cache=None), generated)
    least, needed = handle.stats.min_budget_bytes, handle.stats.needed_budget_bytes
    for budget_bytes in (least, (least + needed) // 2):
        handle.replan(budget_bytes=budget_bytes)
        with DeviceMeter(default_device()) as meter:
            assert torch.equal(tokens(model, IDS, 3, cache=None), generated)
        assert meter.peak_bytes <= budget_bytes
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0
    graphs = [memgraph.graph for memgraph, _ in handle.plans()]
    if split or make is unpacking_model:
        assert any(task.op == JOIN for graph in graphs for task in graph.tasks)
    handle.detach()
