"""A module with parameters of every sort."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from ds_finepage.execution.masters import HostWeight, weights_of
from ds_finepage.execution.stores import WeightTable

CPU = torch.device("cpu")


class Model(nn.Module):
    """Parameters of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(3, 5))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.sparse = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.short = nn.Parameter(torch.randn(7).to(torch.bfloat16))
        self.number = nn.Parameter(torch.tensor(2.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.whole = nn.Parameter(torch.arange(6), requires_grad=False)


def weights_of_module(module: nn.Module, device: torch.device = CPU) -> list[HostWeight]:
    return weights_of(dict(module.named_parameters()), device)


def scripted(module: nn.Module) -> nn.Module:
    """Compile a module to TorchScript, which torch warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.jit.script(module)
    assert isinstance(found, nn.Module)
    return found


def attached(module: nn.Module) -> WeightTable:
    table = WeightTable(weights_of_module(module, CPU), CPU)
    table.install()
    return table
