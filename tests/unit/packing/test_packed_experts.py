"""Fused experts whose matrices are packed: the op, the module, and which of them stay."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    NemotronHConfig,
    OlmoeConfig,
    OlmoeForCausalLM,
)
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from ds_finepage.errors import ConfigError
from ds_finepage.packing import op
from ds_finepage.packing.experts import PackedExperts, expert_weights, unknown
from ds_finepage.packing.form import Packed, PackedForm, pack, unpack
from ds_finepage.packing.linear import PackedWeight
from ds_finepage.packing.model import form_of, pack_model
from ds_finepage.packing.stock import StockPacked, pack_as_stock

FORM = PackedForm(4, 32)
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "num_experts_per_tok": 2,
}
ENDS = torch.tensor([0, 2, 2, 5], dtype=torch.int32)  # two experts have no rows


def matrices(form: PackedForm, num_out: int = 28, dtype: torch.dtype = torch.float32) -> Packed:
    torch.manual_seed(0)
    return pack(torch.randn(4, num_out, 64, dtype=dtype), form)


def mixtral(**changes: Any) -> Any:
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **{**SMALL, **changes})).eval()


def product(x: torch.Tensor, packed: Packed, form: PackedForm, **out: Any) -> torch.Tensor:
    found = op.packed_grouped_linear(x, *packed, ENDS, form.bits, form.group, **out)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.usefixtures("unpacks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_each_row_meets_the_matrix_of_its_expert(bits: int, dtype: torch.dtype) -> None:
    form = PackedForm(bits, 32)
    packed, x = matrices(form, dtype=dtype), torch.randn(6, 64, dtype=dtype)
    first, last = (
        unpack(Packed(*(part[expert] for part in packed)), form, dtype) for expert in (1, 3)
    )
    found = product(x, packed, form)
    assert torch.equal(found[:2], x[:2] @ first.t()) and torch.equal(found[2:5], x[2:5] @ last.t())
    assert not found[5].any()  # behind the last end
    out = torch.full((6, 28), torch.nan, dtype=dtype)
    assert product(x, packed, form, out=out) is out and torch.equal(out, found)


@pytest.mark.usefixtures("unpacks")
def test_only_experts_with_rows_are_unpacked_slice_by_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Packed] = []
    monkeypatch.setattr(op, "SLICE_ROWS", 16)
    monkeypatch.setattr(op, "unpack", lambda p, *args: (seen.append(p), unpack(p, *args))[1])
    packed = matrices(FORM)
    product(torch.randn(5, 64), packed, FORM)
    expected = [packed.numbers[e][rows] for e in (1, 3) for rows in (slice(16), slice(16, 28))]
    assert [p.numbers.data_ptr() for p in seen] == [e.data_ptr() for e in expected]
    assert [p.numbers.shape for p in seen] == [e.shape for e in expected]


@pytest.mark.usefixtures("unpacks")
def test_slices_are_products_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "SLICE_ROWS", 8)
    packed, x = matrices(FORM), torch.randn(5, 64)
    whole = product(x, packed, FORM)
    for begin, end in ((0, 8), (8, 24), (24, 28)):
        cut = Packed(*(part[:, begin:end].contiguous() for part in packed))
        assert torch.equal(product(x, cut, FORM), whole[:, begin:end])


def test_matrices_are_packed_each_by_itself_and_on_the_meta_device() -> None:
    packed = matrices(FORM)
    again = pack(torch.randn(4, 28, 64, device="meta"), FORM)
    assert [p.shape for p in packed] == [p.shape for p in again]
    assert packed.numbers.shape == (4, 28, 32) and packed.scales.shape == (4, 28, 2)
    made = PackedWeight(packed, FORM)
    assert "4 matrices, in_features=64, out_features=28, int4 in groups of 32" in repr(made)
    assert not any(p.requires_grad for p in made.parameters())


def test_packed_experts_stand_for_those_of_mixtral() -> None:
    model = mixtral()
    assert "model.layers.0.mlp.experts" in pack_model(model, FORM)
    layer = model.model.layers[0].mlp
    assert isinstance(layer.experts, PackedExperts) and form_of(layer.experts) == FORM
    names = [name for name, _ in layer.experts.named_parameters()]
    assert names == [
        f"{w}.{p}" for w in ("gate_up", "down") for p in ("numbers", "scales", "minima")
    ]
    assert not layer.experts.training
    assert pack_model(model, FORM) == []  # it is packed already
    with pytest.raises(ConfigError, match="quantised already: .*packed as"):
        pack_model(model, PackedForm(8, 32))


def _gpt_oss() -> Any:
    config = GptOssConfig(num_local_experts=4, head_dim=32, **{**SMALL, "intermediate_size": 64})
    experts = GptOssForCausalLM(config).model.layers[0].mlp.experts
    for bias in (experts.gate_up_proj_bias, experts.down_proj_bias):
        torch.nn.init.normal_(bias, std=0.5)
    return experts


def _nemotron() -> Any:
    config = NemotronHConfig(hidden_size=64, moe_intermediate_size=96, n_routed_experts=4)
    config._experts_implementation = "eager"
    experts = NemotronHExperts(config)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    return experts


EXPERTS = {
    "concatenated": lambda: mixtral().model.layers[0].mlp.experts,
    "olmoe": lambda: (
        OlmoeForCausalLM(OlmoeConfig(num_experts=4, **SMALL)).model.layers[0].mlp.experts
    ),
    "transposed, with biases and a gate of its own": _gpt_oss,
    "without a gate": _nemotron,
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_the_protocol_of_transformers_is_computed(kind: str) -> None:
    """With matrices that packing leaves as they are, results are those of the module itself."""
    torch.manual_seed(0)
    experts = EXPERTS[kind]().eval().requires_grad_(False)
    form = PackedForm(8, 32)
    holder = torch.nn.ModuleDict({"experts": copy.deepcopy(experts)})
    assert pack_model(holder, form) == ["experts"]
    packed: Any = holder["experts"]
    for name, weight in expert_weights(experts).items():
        made = packed.matrices[list(expert_weights(experts)).index(name)]
        parts = (made.numbers, made.scales, made.minima)
        whole = [unpack(Packed(*p), form, torch.float32) for p in zip(*parts, strict=True)]
        matrix = torch.stack(whole)
        weight.copy_(matrix.transpose(1, 2) if experts.is_transposed else matrix)
    x, index = torch.randn(5, 64), torch.tensor([[0, 1], [3, 1], [1, 0], [0, 3], [3, 0]])
    weights = torch.rand(5, 2)
    experts.config._experts_implementation = "batched_mm"
    torch.testing.assert_close(packed(x, index, weights), experts(x, index, weights))


def test_what_follows_the_experts_is_computed() -> None:
    experts = mixtral().model.layers[0].mlp.experts
    holder: Any = torch.nn.ModuleDict({"experts": experts})
    pack_model(holder, FORM)
    packed, given = (
        holder["experts"],
        (torch.randn(2, 64), torch.tensor([[0], [3]]), torch.ones(2, 1)),
    )
    expected = packed(*given)
    packed.has_post_expert_norm, packed.post_expert_norm = True, lambda x: 2 * x
    assert torch.equal(packed(*given), 2 * expected)


def test_a_group_that_does_not_divide_is_refused_by_name() -> None:
    model = mixtral(intermediate_size=80)
    with pytest.raises(ConfigError, match=r"experts.down_proj has rows of 80, .*groups of 32"):
        pack_model(model, FORM)
    assert form_of(model) is None


def test_weights_that_are_tied_stay_or_stay_tied() -> None:
    model = mixtral(num_hidden_layers=3)
    first, second, third = (layer.mlp.experts for layer in model.model.layers)
    second.gate_up_proj = first.gate_up_proj  # and another second matrix
    assert [n for n in pack_model(model, FORM) if "experts" in n] == ["model.layers.2.mlp.experts"]
    assert second.gate_up_proj is first.gate_up_proj

    model = mixtral(num_hidden_layers=2)
    first, second = (layer.mlp.experts for layer in model.model.layers)
    second.gate_up_proj, second.down_proj = first.gate_up_proj, first.down_proj
    assert sum("experts" in name for name in pack_model(model, FORM)) == 2
    first, second = (layer.mlp.experts for layer in model.model.layers)
    assert first.matrices == second.matrices


class _OtherExperts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 64, 64))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"forward": lambda *_: None}, "how it uses gate_up_proj is not known"),
        ({"_is_expert_parallel": True}, "its experts are spread over ranks"),
        ({"has_gate": False}, "its weights are not up_proj and down_proj"),
        ({"act_fn": None}, "its activation is not known"),
    ],
)
def test_experts_that_are_not_known_stay_and_are_named(
    change: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = mixtral()
    vars(model.model.layers[0].mlp.experts)["_modules"].pop("act_fn")
    model.model.layers[0].mlp.experts.act_fn = torch.sigmoid
    for name, value in change.items():
        setattr(model.model.layers[0].mlp.experts, name, value)
    with caplog.at_level(logging.WARNING):
        packed = pack_model(model, FORM)
    assert len(packed) == 4 and not any("experts" in name for name in packed)
    assert f"the experts of model.layers.0.mlp.experts stay as they are: {why}" in caplog.text


def test_modules_of_other_kinds_are_told_apart() -> None:
    assert unknown(_OtherExperts()) == "how it uses weight is not known"
    assert unknown(torch.nn.Conv1d(4, 4, 3)) is None and unknown(torch.nn.Linear(4, 4)) is None
    assert expert_weights(_OtherExperts()) == {}


@pytest.mark.parametrize("bits", [4, 8])
def test_stock_keeps_the_matrices_in_one_parameter(bits: int) -> None:
    model, stock = mixtral(), mixtral()
    pack_model(model, PackedForm(bits, 32))
    pack_as_stock(stock, PackedForm(bits, 32))
    experts = stock.model.layers[0].mlp.experts
    assert all(isinstance(m, StockPacked) for m in experts.matrices)
    names = [name for name, _ in experts.named_parameters()]
    assert names == ["gate_up.weight", "down.weight"]
    tokens = torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(stock(tokens).logits, model(tokens).logits)
