"""Tiny models of many families, with random weights: what the sweep over architectures runs.

Each entry names a class of transformers or diffusers, the sizes of its config, and the inputs of
one forward. Sizes are small, so that a model is made and captured in seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

HIDDEN = 64
VOCAB = 128
PROMPT = 12
IMAGE = 32

Inputs = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    """One model: its class, the sizes of its config, and what it is given.

    ``group`` is the heading under which it is reported. ``inputs`` makes the inputs from a
    generator. ``tokens`` counts what is generated after the forward; 0 for none.
    """

    group: str
    kind: str
    sizes: dict[str, Any]
    inputs: Callable[[torch.Generator], Inputs]
    library: str = "transformers"
    tokens: int = 0


def ids(length: int = PROMPT, vocab: int = VOCAB, name: str = "input_ids") -> Any:
    """Return a maker of token ids."""
    return lambda g: {name: torch.randint(3, vocab, (1, length), generator=g)}


def floats(name: str, *shape: int) -> Any:
    """Return a maker of one tensor of normal random numbers."""
    return lambda g: {name: torch.randn(shape, generator=g)}


def pixels(size: int = IMAGE, channels: int = 3) -> Any:
    """Return a maker of one image."""
    return floats("pixel_values", 1, channels, size, size)


def several(*makers: Any) -> Any:
    """Return a maker of what several makers make."""
    return lambda g: {k: v for make in makers for k, v in make(g).items()}


def fixed(name: str, make: Callable[[], torch.Tensor]) -> Any:
    """Return a maker of a tensor that is always the same."""
    return lambda g: {name: make()}


def image_prompt(image_token: int, num_image_tokens: int, vocab: int = VOCAB) -> Any:
    """Return a maker of token ids, some of which stand for an image."""

    def make(g: torch.Generator) -> Inputs:
        words = torch.randint(3, vocab - 8, (1, 6), generator=g)
        image = torch.full((1, num_image_tokens), image_token)
        found = torch.cat([words[:, :2], image, words[:, 2:]], dim=1)
        return {"input_ids": found, "attention_mask": torch.ones_like(found)}

    return make


TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ENCODER: dict[str, Any] = {k: v for k, v in TEXT.items() if k != "num_key_value_heads"}
VISION: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": IMAGE,
    "patch_size": 8,
}
SPEECH: dict[str, Any] = {
    **ENCODER,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 4, 4),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "apply_spec_augment": False,
    "layerdrop": 0.0,
}


def make_model(tiny: Tiny, dtype: str) -> Any:
    """Make a model; the same arguments give the same weights."""
    kind = getattr(importlib.import_module(tiny.library), tiny.kind)
    torch.manual_seed(0)
    if tiny.library == "diffusers":
        model = kind(**tiny.sizes)
    else:
        model = kind(kind.config_class(**tiny.sizes))
    stir_gently(model)
    return model.eval().to(getattr(torch, dtype))


def stir_gently(model: torch.nn.Module) -> None:
    """Change weights that are all the same, so that a wrong one is seen in the result."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.numel() > 1 and bool((weight == weight.flatten()[0]).all()):
                weight.add_(0.1 * torch.randn_like(weight))


def make_inputs(tiny: Tiny, dtype: str) -> Inputs:
    """Make the inputs of a model; floating-point ones get its dtype."""
    made = tiny.inputs(torch.Generator().manual_seed(1))
    kind = getattr(torch, dtype)
    return {k: v.to(kind) if v.is_floating_point() else v for k, v in made.items()}
