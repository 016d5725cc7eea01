"""Which layers of a model are packed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from ds_finepage.errors import ConfigError
from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.linear import PackedLinear
from ds_finepage.packing.model import form_of, pack_model

FORM = PackedForm(4, 32)
OUTPUT = PackedForm(4, 32, packs_output=True)
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
}


def names_of(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, PackedLinear)]


def test_the_layers_of_a_llama_are_packed_but_its_output_embeddings() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    packed = pack_model(model, FORM)
    assert packed == names_of(model) and len(packed) == 7
    assert type(model.lm_head) is torch.nn.Linear
    assert pack_model(model, FORM) == []  # it is packed already


def test_the_output_layer_is_packed_where_the_form_says_so() -> None:
    model: Any = LlamaForCausalLM(LlamaConfig(**SMALL))
    packed = pack_model(model, OUTPUT)
    assert packed == names_of(model) and len(packed) == 8 and packed[-1] == "lm_head"
    assert pack_model(model, OUTPUT) == [] and form_of(model) == OUTPUT
    with pytest.raises(ConfigError, match=r"packed as .*packs_output=True"):
        pack_model(model, FORM)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_tied_output_layer_stays(device: str) -> None:
    with torch.device(device):
        model: Any = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **SMALL))
    assert len(pack_model(model, OUTPUT)) == 7
    assert type(model.lm_head) is torch.nn.Linear


def test_the_layers_of_gpt2_lie_the_other_way() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=32, n_positions=16)
    model: Any = GPT2LMHeadModel(config).eval()
    conv, x = model.transformer.h[0].mlp.c_fc, torch.randn(2, 64)
    expected = conv(x)
    assert len(pack_model(model, PackedForm(8, 32))) == 4
    assert (model.transformer.h[0].mlp.c_fc(x) - expected).abs().max() < 0.01


@pytest.mark.parametrize("form", [FORM, OUTPUT])
def test_layers_that_transformers_keeps_in_float32_stay(form: PackedForm) -> None:
    config = T5Config(
        d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2, vocab_size=32, is_gated_act=False
    )
    wrapped = torch.nn.Sequential(T5ForConditionalGeneration(config))
    packed = pack_model(wrapped, form)
    assert "0.encoder.block.0.layer.1.DenseReluDense.wi" in packed
    assert not any(name.endswith((".wo", "lm_head")) for name in packed)


def test_shared_layers_and_tied_weights_are_packed_once() -> None:
    one, two, three = (torch.nn.Linear(64, 64) for _ in range(3))
    two.weight = one.weight
    model: Any = torch.nn.Sequential(one, two, torch.nn.Sequential(one, three))
    assert pack_model(model, FORM) == ["0", "1", "2.1"]
    assert model[0] is model[2][0] and model[0].numbers is model[1].numbers
    assert model[1].bias is two.bias and model[2][1].numbers is not model[0].numbers


def test_a_weight_that_another_module_has_too_stays() -> None:
    table, head, other = torch.nn.Embedding(8, 64), torch.nn.Linear(64, 8), torch.nn.Linear(64, 64)
    head.weight = table.weight
    model = torch.nn.Sequential(table, other, head)
    assert pack_model(model, FORM) == ["1"]


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="Sequential has no linear layer"):
        pack_model(torch.nn.Sequential(torch.nn.Embedding(8, 64)), FORM)


def test_nothing_is_packed_if_one_weight_cannot_be() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Linear(48, 8))
    with pytest.raises(ConfigError, match=r"1.weight has rows of 48, .*groups of 32"):
        pack_model(model, FORM)
    assert names_of(model) == []


def test_a_model_that_is_quantised_already_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 8))
    pack_model(model, FORM)
    with pytest.raises(ConfigError, match=r"quantised already: 0 is packed as .*group=32"):
        pack_model(model, PackedForm(8, 32))
    configured: Any = torch.nn.Sequential(torch.nn.Linear(64, 8))
    configured.config = SimpleNamespace(quantization_config={"quant_method": "gptq"})
    with pytest.raises(ConfigError, match="Sequential.config has a quantization_config"):
        pack_model(configured, FORM)
    integers = torch.nn.Sequential(torch.nn.Linear(64, 8))
    integers[0].weight = torch.nn.Parameter(torch.zeros(8, 64, dtype=torch.int8), False)
    with pytest.raises(ConfigError, match=r"0.weight is a Parameter of torch.int8"):
        pack_model(integers, FORM)
