"""Layers that unpack their weights themselves: equal, and never more than a slice is unpacked."""

from __future__ import annotations

import torch

import ds_finepage
from ds_finepage.graph.taskgraph import JOIN
from tests.integration.families import make_model, token_ids
from tests.integration.parity import equal, results, same_within

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


def test_tokens_are_those_of_the_same_model_within_any_budget() -> None:
    model = unpacking_model()
    plain = results(model, IDS)
    handle = ds_finepage.attach(model, device_budget="64MiB")
    assert equal(results(model, IDS), plain)
    least, needed = handle.stats.min_budget_bytes, handle.stats.needed_budget_bytes
    for seed, budget_bytes in enumerate((least, (least + needed) // 2)):
        same_within(handle, lambda: results(model, IDS), plain, budget_bytes, seed)
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0
    graphs = [memgraph.graph for memgraph, _ in handle.plans()]
    assert any(task.op == JOIN for graph in graphs for task in graph.tasks)
    handle.detach()
