"""Packed weights and activations, and their fused product on whatever device they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_finepage.packing import op
from ds_finepage.packing.form import Packed, PackedForm, pack
from ds_finepage.packing.fused import fused_product
from ds_finepage.packing.linear import PackedLinear


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU have fused products."""
    monkeypatch.setattr(op, "why_not", lambda where: None)


def packed_weight(form: PackedForm, *shape: int, dtype: torch.dtype = torch.float32) -> Packed:
    torch.manual_seed(0)
    weight = torch.randn(shape, dtype=dtype)
    return pack(weight, form)


def packed_layer_of(linear: torch.nn.Linear, form: PackedForm) -> PackedLinear:
    return PackedLinear(pack(linear.weight.detach(), form), form, linear.bias)


def rows_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(shape, dtype=dtype)


def product(x: torch.Tensor, packed: Packed, form: PackedForm, bias: Any = None) -> torch.Tensor:
    found = x.new_full((len(x), len(packed.numbers)), torch.nan)
    fused_product(x, packed, bias, form, found)
    return found
