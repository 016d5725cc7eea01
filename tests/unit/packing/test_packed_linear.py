"""The op that multiplies by a packed weight, and the layer that calls it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_finepage.packing import op
from ds_finepage.packing.form import PackedForm, unpack
from tests.unit.packing.products import packed_layer_of


def layer(form: PackedForm, *, num_out: int = 24, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, num_out).to(dtype).requires_grad_(False)
    return packed_layer_of(linear, form)


@pytest.mark.usefixtures("unpacks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_it_is_the_product_with_the_unpacked_weight(bits: int, dtype: torch.dtype) -> None:
    packed = layer(PackedForm(bits, 32), dtype=dtype)
    x = torch.randn(2, 3, 64, dtype=dtype)
    expected = torch.nn.functional.linear(x, packed.weight, packed.bias)
    found = packed(x)
    assert found.shape == (2, 3, 24) and found.dtype is dtype
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("unpacks")
@pytest.mark.parametrize("num_rows", [1, 5])
@pytest.mark.parametrize("has_bias", [False, True])
def test_slices_are_products_of_their_own(
    has_bias: bool, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "SLICE_ROWS", 8)
    form = PackedForm(4, 32)
    whole = layer(form, num_out=28)
    bias = whole.bias if has_bias else None
    x = torch.randn(num_rows, 64)
    parts = (whole.numbers, whole.scales, whole.minima)
    expected = op.packed_linear(x, *parts, bias, form.bits, form.group)
    for begin, end in ((0, 8), (8, 24), (24, 28)):
        cut = [part[begin:end] for part in parts]
        its_bias = None if bias is None else bias[begin:end]
        found = op.packed_linear(x, *cut, its_bias, form.bits, form.group)
        assert torch.equal(found, expected[:, begin:end])


def test_it_writes_into_a_given_tensor() -> None:
    form = PackedForm(8)
    packed = layer(form)
    x, out = torch.randn(3, 64), torch.empty(3, 24)
    given = (x, packed.numbers, packed.scales, packed.minima, packed.bias, 8, 64)
    assert op.packed_linear(*given, out=out) is out
    assert torch.equal(out, packed(x))


@pytest.mark.usefixtures("unpacks")
def test_only_a_slice_is_unpacked_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(op, "SLICE_ROWS", 16)
    monkeypatch.setattr(op, "unpack", lambda *args: (seen.append(m := unpack(*args)), m)[1])
    layer(PackedForm(4))(torch.randn(1, 64))
    assert [tuple(m.shape) for m in seen] == [(16, 64), (8, 64)]


def test_it_has_shapes_without_data() -> None:
    packed = packed_layer_of(torch.nn.Linear(64, 24, device="meta"), PackedForm(4))
    assert packed(torch.empty(2, 64, device="meta")).shape == (2, 24)
    assert packed.numbers.shape == (24, 32) and packed.scales.shape == (24, 1)


def test_the_layer_shows_itself() -> None:
    packed = layer(PackedForm(4, 32))
    assert "in_features=64, out_features=24, bias=True, int4 in groups of 32" in repr(packed)
    assert list(packed.state_dict()) == ["numbers", "scales", "minima", "bias"]
    assert not any(p.requires_grad for p in packed.parameters())
