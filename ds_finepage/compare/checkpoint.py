"""Makes a checkpoint with a tokenizer; nothing is downloaded.

Weights are random, from a fixed seed, and spread widely enough for greedy tokens to vary. The
tokenizer is trained on the source of this package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_finepage.errors import ConfigError
from ds_finepage.units import format_bytes

SEED = 0
WEIGHT_STD = 0.05
"""With the 0.02 of transformers the model repeats one token."""

MOST_TOKENS = 2048
"""Of a tokenizer that is trained here; more would take time and tell nothing."""


def make_tokenizer(folder: Path, vocab_size: int) -> None:
    """Train a byte-level BPE tokenizer on this package's source and write it."""
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(__file__).parents[1].rglob("*.py"))  # text that every machine has
    tokenizer.train(list(map(str, sources)), trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def make_checkpoint(folder: Path, model: str, num_layers: int = 0) -> None:
    """Write a checkpoint that ``from_pretrained`` reads: safetensors and a tokenizer.

    Args:
        folder: Gets the files.
        model: A shipped name, or the path of a config; its shape is that of the weights.
        num_layers: Layers to make, 0 for all.

    Raises:
        ConfigError: There is no such model, or the host memory has no room for it.
    """
    import psutil
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from ds_finepage.capture.models import load_model_config

    config: Any = load_model_config(model)
    if num_layers:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:num_layers]
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    config.initializer_range = config.init_std = WEIGHT_STD
    config.dtype = torch.bfloat16
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).parameters()
        weight_bytes = sum(w.nbytes for w in weights)
    free_bytes = psutil.virtual_memory().available
    if weight_bytes > free_bytes:
        raise ConfigError(
            f"{config.num_hidden_layers} layers of {model} have {format_bytes(weight_bytes)} of "
            f"weights; {format_bytes(free_bytes)} of host memory are free. Give fewer --layers."
        )
    make_tokenizer(folder, min(config.vocab_size, MOST_TOKENS))
    logging.disable_progress_bar()
    torch.manual_seed(SEED)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(folder)
