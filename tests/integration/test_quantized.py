"""Models whose weights torchao has packed: equal to the same quantised model, within the budget."""

from __future__ import annotations

import pytest
import torch
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8Tensor,
    Int8WeightOnlyConfig,
    quantize_,
)
from transformers import GPT2Config, GPT2LMHeadModel
from transformers import PreTrainedModel as Model

import ds_finepage
from ds_finepage.execution.device import default_device
from ds_finepage.execution.meter import DeviceMeter
from tests.integration.engines import ds_config, one_process_deepspeed
from tests.integration.families import make_model

PROMPT = torch.arange(9)[None]
GENERATE = {"max_new_tokens": 3, "do_sample": False, "disable_compile": True}
KINDS = {"weights": Int8WeightOnlyConfig, "activations": Int8DynamicActivationInt8WeightConfig}


def llama(dtype: torch.dtype) -> Model:
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 512}
    model = make_model("llama", dtype, **sizes, vocab_size=512, initializer_range=0.05)
    assert isinstance(model, Model)
    return model


def logits(model: Model) -> torch.Tensor:
    with torch.no_grad():
        found = model(PROMPT).logits
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize(
    ("kind", "dtype"), [("weights", torch.float32), ("activations", torch.bfloat16)], ids=str
)
def test_a_quantised_model_runs_under_budgets_and_comes_back(kind: str, dtype: torch.dtype) -> None:
    model = llama(dtype)
    quantize_(model, KINDS[kind]())
    keys, weight = list(model.state_dict()), model.lm_head.weight
    expected, tokens = logits(model), model.generate(PROMPT, **GENERATE)

    handle = ds_finepage.attach(model, device_budget="200%weights")
    assert torch.equal(logits(model), expected)
    assert torch.equal(model.generate(PROMPT, **GENERATE), tokens)
    # The packed bytes are those that count.
    packed = sum(p.nbytes for p in model.parameters())
    assert handle.stats.weight_bytes == packed < sum(p.nbytes for p in llama(dtype).parameters())
    least = handle.stats.min_budget_bytes
    for budget_bytes in ((least + packed) // 2, least):
        handle.replan(budget_bytes=budget_bytes)
        with DeviceMeter(default_device()) as meter:
            assert torch.equal(model.generate(PROMPT, **GENERATE), tokens)
        assert meter.peak_bytes <= budget_bytes
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0

    handle.detach()
    assert list(model.state_dict()) == keys and model.lm_head.weight is weight
    assert isinstance(weight, Int8Tensor) and torch.equal(logits(model), expected)


def test_weights_quantised_while_attached_are_taken_over() -> None:
    model, same = llama(torch.float32), llama(torch.float32)
    quantize_(same, Int8WeightOnlyConfig())
    handle = ds_finepage.attach(model, device_budget="90%weights")
    logits(model)
    quantize_(model, Int8WeightOnlyConfig())
    assert torch.equal(logits(model), logits(same))
    assert any(n.endswith("weight_qdata") for n, _ in model.named_parameters())
    handle.detach()
    assert torch.equal(logits(model), logits(same))


def test_a_model_in_which_few_weights_are_packed_runs() -> None:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=128, n_layer=1, n_head=2, vocab_size=256, n_positions=64)
    model = GPT2LMHeadModel(config).eval()
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda _, name: name == "lm_head")
    expected = logits(model)
    handle = ds_finepage.attach(model, device_budget="70%weights")
    assert torch.equal(logits(model), expected)
    assert handle.stats.num_unplanned_graphs == 0


def test_deepspeed_runs_a_quantised_model_by_plan() -> None:
    model = llama(torch.bfloat16)
    quantize_(model, Int8WeightOnlyConfig())
    tokens = model.generate(PROMPT, **GENERATE)
    with one_process_deepspeed() as deepspeed:
        section = {"enabled": True, "device_budget": "80%weights"}
        config = ds_config(section, bf16={"enabled": True})
        engine, *_ = deepspeed.initialize(model=model, config=config)
        assert torch.equal(engine.module.generate(PROMPT, **GENERATE), tokens)
        stats = ds_finepage.stats(engine)
        assert stats.num_unplanned_graphs == 0 and stats.reloaded_bytes > 0
        engine.destroy()
