"""Small models, and a few requests for the continuous batching of transformers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from tests.integration.families import make_model, token_ids

NAMES = {f.name for f in fields(ContinuousBatchingConfig)}
PAGE_SIZE = "page_size" if "page_size" in NAMES else "block_size"
"""The setting has the second name in transformers 5.17."""
LENGTHS = (5, 40, 17, 3, 60, 33)


def llama() -> Any:
    return make_model("llama", vocab_size=512)


def gemma3() -> Any:
    """Layers with a sliding window, and layers without."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    changes = {"layer_types": kinds, "num_hidden_layers": 3, "vocab_size": 512}
    return make_model("gemma3", torch.bfloat16, **changes)


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
