"""Packed layers in one parameter, as DeepSpeed's own quantisation keeps them."""

from __future__ import annotations

import copy

import pytest
import torch
from deepspeed.inference.quantization.utils import Quantizer, concat_to_compat_param

from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.stock import StockPacked, pack_as_stock
from tests.unit.packing.products import packed_layer_of


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_results_are_those_of_the_packed_layer(bits: int, bias: bool) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(128, 300, bias=bias, dtype=torch.bfloat16)
    layer = packed_layer_of(linear, PackedForm(bits)).eval()
    stock = StockPacked(layer)
    x = torch.randn(3, 128, dtype=torch.bfloat16)
    assert torch.equal(stock(x), layer(x))
    assert not stock.training and not stock.weight.requires_grad
    assert [name for name, _ in stock.named_parameters()] == ["weight", *(["bias"] if bias else [])]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64])
def test_the_bytes_are_those_of_deepspeed(bits: int, group: int) -> None:
    """DeepSpeed's own classes pack the same matrix."""
    linear = torch.nn.Linear(128, 48, bias=False, dtype=torch.bfloat16)
    config = {"num_bits": bits, "group_size": group, "group_dim": 1, "symmetric": False}
    numbers, scales, minima = Quantizer(config).quantize(linear.weight.data)
    theirs = concat_to_compat_param(numbers.view(torch.bfloat16), scales, minima)
    ours = StockPacked(packed_layer_of(linear, PackedForm(bits, group))).weight
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def test_numbers_that_fill_no_whole_element_are_padded() -> None:
    linear = torch.nn.Linear(6, 3, bias=False)
    layer = packed_layer_of(linear, PackedForm(4, 2))
    stock = StockPacked(layer)
    assert layer.numbers.numel() == 9 and stock.weight.numel() == 3 + 9 + 9
    assert torch.equal(stock(torch.eye(6)), layer(torch.eye(6)))


def test_layers_that_are_one_stay_one() -> None:
    linear = torch.nn.Linear(64, 64)
    model = torch.nn.Sequential(linear, torch.nn.ReLU(), linear)
    expected = copy.deepcopy(model)
    pack_as_stock(model, PackedForm(8))
    assert isinstance(model[0], StockPacked) and model[0] is model[2]
    assert expected(torch.ones(1, 64)).shape == model(torch.ones(1, 64)).shape


def test_only_shapes_are_made_on_the_meta_device() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, device="meta", dtype=torch.float16))
    pack_as_stock(model, PackedForm(4))
    weight = model[0].weight
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.is_meta and weight.nbytes == 32 * (64 // 2 + 4)
