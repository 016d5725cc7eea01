"""The output layer beside packed weights: a slice of its weight at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ds_finepage.capture.counts import FLOP_COUNTS
from ds_finepage.packing import sliced
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import pack_model
from ds_finepage.packing.sliced import SlicedLinear, slice_output, sliced_linear
from tests.integration.families import VOCAB, make_model

STEP = VOCAB // 4


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sliced, "OUTPUT_ROWS", STEP)


def linear(num_out: int, *, has_bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return torch.nn.Linear(32, num_out, bias=has_bias).to(dtype).requires_grad_(False)


def sliced_of(linear: torch.nn.Linear) -> SlicedLinear:
    made: Any = copy.deepcopy(linear)
    made.__class__ = SlicedLinear
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_slices_are_products_of_their_own(
    num_rows: int, has_bias: bool, dtype: torch.dtype
) -> None:
    num_out = 3 * STEP + 20
    plain = linear(num_out, has_bias=has_bias, dtype=dtype)
    layer = sliced_of(plain)
    x = torch.randn(2, num_rows, 32).to(dtype)
    expected = layer(x)
    assert expected.shape == (2, num_rows, num_out) and expected.dtype is dtype
    torch.testing.assert_close(expected, plain(x))
    out = torch.full_like(expected, float("nan"))
    assert sliced_linear(x, layer.weight, layer.bias, out=out) is out
    assert torch.equal(out, expected)
    for begin, end in ((0, STEP), (STEP, 3 * STEP), (3 * STEP, num_out)):
        bias = layer.bias[begin:end] if has_bias else None
        sliced_linear(x, layer.weight[begin:end], bias, out=out[..., begin:end].fill_(0))
        assert torch.equal(out, expected)


def test_a_slice_of_the_layer_is_multiplied_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, widths = sliced_of(linear(2 * STEP + 3, has_bias=False)), []
    mm = torch.mm

    def counted(rows: torch.Tensor, matrix: torch.Tensor, **more: Any) -> torch.Tensor:
        widths.append(matrix.shape[1])
        return mm(rows, matrix, **more)

    monkeypatch.setattr(torch, "mm", counted)
    layer(torch.ones(1, 32))
    assert widths == [STEP, STEP, 3]


def test_it_counts_as_a_product() -> None:
    count = FLOP_COUNTS[str(sliced_linear)]
    assert count(torch.ones(2, 3, 32), torch.ones(STEP, 32), None) == 2 * 6 * 32 * STEP


def test_it_shows_itself_and_has_shapes_without_data() -> None:
    plain = linear(2 * STEP)
    assert repr(sliced_of(plain)) == repr(plain).replace("Linear", "SlicedLinear")
    on_meta = sliced_of(plain.to("meta"))
    assert on_meta(torch.ones(3, 32, device="meta")).shape == (3, 2 * STEP)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_packed_model_has_a_sliced_output_layer(is_tied: bool) -> None:
    model: Any = make_model("llama", tie_word_embeddings=is_tied, num_hidden_layers=1)
    plain, weight = model.lm_head, model.lm_head.weight
    pack_model(model, PackedForm(4, 32))
    assert type(plain) is SlicedLinear and model.lm_head is plain and plain.weight is weight
    assert not plain.training
    assert (model.get_input_embeddings().weight is weight) is is_tied
    assert model.get_output_embeddings() is model.lm_head
    assert "lm_head.weight" in model.state_dict()
    assert pack_model(model, PackedForm(4, 32)) == [] and type(plain) is SlicedLinear


def test_other_output_layers_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make_model("llama", num_hidden_layers=1)
    packed = copy.deepcopy(model)
    pack_model(packed, PackedForm.parse("int4+output", 32))
    assert not isinstance(packed.lm_head, SlicedLinear)
    model.lm_head = type("Own", (torch.nn.Linear,), {})(128, VOCAB)
    slice_output(model)
    assert not isinstance(model.lm_head, SlicedLinear)
    model.lm_head = torch.nn.Linear(128, STEP)  # a slice
    pack_model(model, PackedForm(4, 32))
    assert type(model.lm_head) is torch.nn.Linear
    without = torch.nn.Sequential(torch.nn.Linear(64, 2 * STEP))
    slice_output(without)
    assert type(without[0]) is torch.nn.Linear
