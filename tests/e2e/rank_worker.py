"""What one rank does in ``test_ranks.py``: writes what it found into a file of its own."""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import ds_finepage
from ds_finepage.errors import FinepageError, PlanInfeasibleError

RANK = int(os.environ["RANK"])
NUM_NEW = 4
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
}
LLAMA_SIZES = {**SIZES, "intermediate_size": 384, "num_key_value_heads": 2}
CUT_OF_MIXTRAL = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.self_attn\.o_proj\.weight$"], "partition_type": "row"},
    ],
}
MAKERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA_SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA_SIZES, head_dim=32)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=512, word_embed_proj_dim=128)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**LLAMA_SIZES, num_local_experts=4)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=64, n_layer=1, n_head=4)),
}


def ds_config(*, dtype: torch.dtype = torch.float32, size: int = 2, **changes: Any) -> Any:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": False}},
        "bf16": {"enabled": dtype is torch.bfloat16},
        "tensor_parallel": {"autotp_size": size, **changes.pop("tensor_parallel", {})},
        "finepage": {"enabled": True, "device_budget": "70%weights", **changes},
    }


def engine_of(model: torch.nn.Module, config: Any) -> Any:
    return deepspeed.initialize(model=copy.deepcopy(model), config=config)[0]


def prompt() -> torch.Tensor:
    return torch.randint(0, 96, (2, 7), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def generated(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        pad_token_id=0,
    )
    return model(ids, use_cache=False).logits, tokens.tolist()


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except FinepageError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def step_bytes(handle: Any) -> int:
    """Return what the last decode step reloaded."""
    return int(handle.stats.passes[-1].last_reloaded_bytes)


def run_family(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Run one model by plan under budgets from the least to the whole, beside stock AutoTP."""
    torch.manual_seed(0)
    plain = MAKERS[name]().eval().to(dtype)
    more = {"partition_config": CUT_OF_MIXTRAL} if name == "mixtral" else {}
    wanted, tokens = generated(plain, prompt())
    stock = engine_of(plain, ds_config(dtype=dtype, tensor_parallel=more, enabled=False))
    stock.eval()
    far, _ = generated(stock.module, prompt())
    stock.destroy()
    engine = engine_of(plain, ds_config(dtype=dtype, tensor_parallel=more))
    engine.eval()
    handle = ds_finepage.handle_of(engine)
    found: dict[str, Any] = {"stock": (far - wanted).abs().max().item(), "budgets": {}}
    weight_bytes = handle.stats.weight_bytes
    for share in (0.7, 0.0, 1.0):
        least = max((p.min_budget_bytes for p in handle.stats.passes), default=0)
        budget_bytes = max(least, int(weight_bytes * share))
        handle.replan(budget_bytes=budget_bytes)
        logits, made = generated(engine.module, prompt())
        found["budgets"][share] = {
            "bytes": budget_bytes,
            "distance": (logits - wanted).abs().max().item(),
            "tokens": made == tokens,
        }
    found["reasons"] = handle.stats.unplanned_reasons
    found["unplanned"] = handle.stats.num_unplanned_graphs + handle.stats.num_unplanned_modules
    found["weight_bytes"] = weight_bytes
    engine.destroy()
    return found
