"""Tiny random models of many families, and the token ids to call them with.

Sizes are chosen so that a quarter of what a model needs is enough to run any of its ops: a small
vocabulary, no weight that is much larger than the others, and as few layers as that allows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import transformers as hf

from ds_finepage._compat.transformers import cache_name
from ds_finepage.graph.hardware import HardwareProfile

HIDDEN = 128
VOCAB = 256
POSITIONS = 256
SLIDING_WINDOW = 16

CACHE = cache_name(hf.LlamaForCausalLM.forward)
"""The name of a KV cache, among the arguments of a model and in what it returns."""

SLOW_LINK = HardwareProfile(
    name="a slow link",
    source="test",
    capacity_bytes=2**40,
    h2d_bytes_per_s=1e8,
    d2h_bytes_per_s=1e8,
    memory_bytes_per_s=1e12,
    flops_per_s={"default": 1e12},
    launch_ns=100,
)
"""A machine on which every byte that is not copied pays, however small the model."""

SLOWER_LINK = replace(SLOW_LINK, h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e6)
"""No copy hides behind an op, not even on a processor that is slow, or busy with other work."""

_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MORE: dict[str, Any] = {"num_hidden_layers": 3}  # for families of small layers
_GATED: dict[str, Any] = {**_COMMON, "intermediate_size": 2 * HIDDEN}
_GROUPED: dict[str, Any] = {**_GATED, "num_key_value_heads": 2}

LAST: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1}
"""A call that keeps a cache, and returns the logits of the last position."""

WIDE_CACHE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 64,
    "head_dim": 64,
    "num_key_value_heads": 4,
}
"""Sizes of a Llama whose few layers have rows of more bytes than any op needs."""

FAMILIES: dict[str, Callable[..., torch.nn.Module]] = {
    "llama": lambda **k: hf.LlamaForCausalLM(hf.LlamaConfig(**{**_GROUPED, **k})),
    "gpt2": lambda **k: hf.GPT2LMHeadModel(
        hf.GPT2Config(**{**_COMMON, **_MORE, "n_positions": POSITIONS, "n_inner": 2 * HIDDEN, **k})
    ),
    "opt": lambda **k: hf.OPTForCausalLM(
        hf.OPTConfig(
            **{**_COMMON, **_MORE, "ffn_dim": 2 * HIDDEN, "word_embed_proj_dim": HIDDEN, **k}
        )
    ),
    "mistral": lambda **k: hf.MistralForCausalLM(
        hf.MistralConfig(**{**_GROUPED, "sliding_window": SLIDING_WINDOW, **k})
    ),
    "qwen3": lambda **k: hf.Qwen3ForCausalLM(hf.Qwen3Config(**{**_GROUPED, "head_dim": 32, **k})),
    "gemma": lambda **k: hf.GemmaForCausalLM(
        hf.GemmaConfig(**{**_GROUPED, **_MORE, "head_dim": 32, **k})
    ),
    "phi": lambda **k: hf.PhiForCausalLM(hf.PhiConfig(**{**_GATED, **k})),
}

_EXPERTS: dict[str, Any] = {**_GROUPED, "num_experts_per_tok": 2}
_WINDOWED: dict[str, Any] = {
    **_GROUPED,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": SLIDING_WINDOW,
}

MORE_FAMILIES: dict[str, Callable[..., torch.nn.Module]] = {
    "gpt_neox": lambda **k: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**{**_GATED, **k})),
    "bloom": lambda **k: hf.BloomForCausalLM(
        hf.BloomConfig(**{**_COMMON, "n_head": 4, "n_layer": 2, **k})
    ),
    "falcon": lambda **k: hf.FalconForCausalLM(
        hf.FalconConfig(**{**_COMMON, "ffn_hidden_size": 2 * HIDDEN, **k})
    ),
    "qwen2": lambda **k: hf.Qwen2ForCausalLM(hf.Qwen2Config(**{**_GROUPED, **k})),
    "qwen3_moe": lambda **k: hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
            **{**_EXPERTS, "head_dim": 32, "num_experts": 4, "moe_intermediate_size": 64, **k}
        )
    ),
    "mixtral": lambda **k: hf.MixtralForCausalLM(
        hf.MixtralConfig(**{**_EXPERTS, "num_local_experts": 4, **k})
    ),
    "gemma2": lambda **k: hf.Gemma2ForCausalLM(hf.Gemma2Config(**{**_WINDOWED, **k})),
    "gemma3": lambda **k: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(
            **{**_WINDOWED, "layer_types": ["sliding_attention", "full_attention"], **k}
        )
    ),
    "phi3": lambda **k: hf.Phi3ForCausalLM(hf.Phi3Config(**{**_GROUPED, **k})),
}
"""Families beside those that every test of equality goes over."""


def make_model(
    family: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **config: Any
) -> Any:
    """Make a model; the same arguments give the same weights.

    Its ``generate`` never stops early, so that two runs have equally many tokens.
    """
    torch.manual_seed(seed)
    model = {**FAMILIES, **MORE_FAMILIES}[family](**config).eval().to(dtype)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def opposite(model: Any) -> Any:
    """Make a draft that is never right."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        draft.lm_head.weight.neg_()
    return draft


def token_ids(length: int, *, batch: int = 1, seed: int = 1) -> torch.Tensor:
    """Return token ids of shape (batch, length), none of which is padding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (batch, length), generator=generator)


@torch.no_grad()
def prompt_and_steps(model: Any, device: torch.device | None = None) -> torch.Tensor:
    """Return the logits of a prompt whose cache has no room for more, and of steps behind it."""
    out = model(token_ids(63).to(device), **LAST)
    found = [out.logits]
    for seed in range(3):
        new = token_ids(1, seed=seed).to(device)
        out = model(new, **{CACHE: out[CACHE]}, **LAST)
        found.append(out.logits)
    return torch.cat(found)


def left_padded(length: int, pad: int) -> dict[str, torch.Tensor]:
    """Return two prompts of ``length``, the first of which begins with ``pad`` padding tokens."""
    ids = token_ids(length, batch=2, seed=2)
    mask = torch.ones_like(ids)
    ids[0, :pad] = 0
    mask[0, :pad] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(model: Any, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    """Run one forward pass over whole prompts."""
    with torch.no_grad():
        found = model(input_ids, **inputs).logits
    assert isinstance(found, torch.Tensor)
    return found


def tokens(
    model: Any,
    input_ids: torch.Tensor,
    num_tokens: int,
    *,
    cache: str | None = "static",
    **inputs: Any,
) -> torch.Tensor:
    """Generate greedily; ``cache=None`` is the model's default one."""
    with torch.no_grad():
        found = model.generate(
            input_ids,
            max_new_tokens=num_tokens,
            do_sample=False,
            cache_implementation=cache,
            **inputs,
        )
    assert isinstance(found, torch.Tensor)
    return found


def greedy(model: Any, **settings: Any) -> torch.Tensor:
    inputs = {"input_ids": token_ids(9)} if "input_ids" not in settings else {}
    return model.generate(
        **inputs, **{"max_new_tokens": 10, "do_sample": False, "use_cache": True, **settings}
    )


class Streamer:
    """Keeps what comes out: the prompt, and each token."""

    def __init__(self) -> None:
        self.got: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.got.append(value.reshape(-1).clone())

    def end(self) -> None:
        pass


def tiny(seed: int = 0) -> torch.nn.Sequential:
    """Make two products with something in between, for what needs no language model."""
    torch.manual_seed(seed)
    linear = torch.nn.Linear
    return torch.nn.Sequential(linear(16, 32), torch.nn.GELU(), linear(32, 16)).eval()
