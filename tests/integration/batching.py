"""Small models, and a few requests for the continuous batching of transformers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import transformers as hf
from transformers import ContinuousBatchingConfig, GenerationConfig

from tests.integration.families import token_ids

SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
NAMES = {f.name for f in fields(ContinuousBatchingConfig)}
PAGE_SIZE = "page_size" if "page_size" in NAMES else "block_size"
"""The setting has the second name in transformers 5.17."""
LENGTHS = (5, 40, 17, 3, 60, 33)


def llama() -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**{**SMALL, "num_hidden_layers": 2})).eval()


def gemma3() -> Any:
    """Layers with a sliding window, and layers without."""
    torch.manual_seed(0)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    config = hf.Gemma3TextConfig(**SMALL, head_dim=32, sliding_window=16, layer_types=kinds)
    return hf.Gemma3ForCausalLM(config).to(torch.bfloat16).eval()


def outputs_of(model: Any, **settings: Any) -> list[Any]:
    found = model.generate_batch(
        inputs=[token_ids(n, seed=n)[0].tolist() for n in LENGTHS],
        generation_config=GenerationConfig(
            max_new_tokens=12, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            max_batch_tokens=64, max_requests_per_batch=4, **{PAGE_SIZE: 16}, **settings
        ),
        progress_bar=False,
    )
    return list(found.values())


def tokens_of(model: Any, **settings: Any) -> list[list[int]]:
    return [output.generated_tokens for output in outputs_of(model, **settings)]
