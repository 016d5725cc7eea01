"""Makes a checkpoint with a tokenizer; nothing is downloaded.

    python -m ds_finepage.compare.checkpoint FOLDER [SHAPE_AS_JSON]
    python -m ds_finepage.compare.checkpoint FOLDER SHIPPED_NAME NUM_LAYERS

The first form makes a small Llama. The second one makes a model of a shipped name's shape with that
many layers, 0 for all.

Weights are random, from a fixed seed, and spread widely enough for greedy tokens to vary. The
tokenizer is trained on the source of this package.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_finepage.errors import ConfigError, FinepageError
from ds_finepage.units import format_bytes

SEED = 0
WEIGHT_STD = 0.05
"""With the 0.02 of transformers the model repeats one token."""

MOST_TOKENS = 2048
"""Of a tokenizer that is trained here; more would take time and tell nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama model; the default ones make 163 MB of bfloat16 weights.

    As in real models, a weight is small beside what has no room.
    """

    hidden_size: int = 576
    intermediate_size: int = 1408
    num_hidden_layers: int = 21
    num_attention_heads: int = 9
    num_key_value_heads: int = 9
    vocab_size: int = 2048
    max_position_embeddings: int = 2048
    dtype: str = "bfloat16"


def make_checkpoint(folder: Path, shape: LlamaShape) -> None:
    """Write a checkpoint that ``from_pretrained`` reads: safetensors and a tokenizer."""
    write(folder, config_of(shape), shape.dtype)


def write(folder: Path, config: Any, dtype: str) -> None:
    """Write a model of a config with random weights, and a tokenizer for it."""
    import torch
    from transformers import AutoModelForCausalLM

    make_tokenizer(folder, min(config.vocab_size, MOST_TOKENS))
    torch.manual_seed(SEED)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)


def config_of(shape: LlamaShape) -> Any:
    """Return the config of transformers for a Llama of some sizes."""
    import transformers

    sizes = {key: value for key, value in asdict(shape).items() if key != "dtype"}
    return transformers.LlamaConfig(
        **sizes,
        initializer_range=WEIGHT_STD,
        bos_token_id=None,
        eos_token_id=None,  # so that no run stops early
        pad_token_id=None,
    )


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


def make_shipped(folder: Path, name: str, num_layers: int) -> None:
    """Write a model of a shipped name's shape, with so many layers, 0 for all; in bfloat16.

    Raises:
        ConfigError: The host memory has no room for it.
    """
    import psutil
    import torch
    from transformers import AutoModelForCausalLM

    from ds_finepage.capture.models import load_model_config

    config: Any = load_model_config(name)
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
            f"{config.num_hidden_layers} layers of {name} have {format_bytes(weight_bytes)} of "
            f"weights; {format_bytes(free_bytes)} of host memory are free. Give fewer --layers."
        )
    write(folder, config, "bfloat16")


def main(arguments: list[str]) -> None:
    """Write a checkpoint."""
    folder, *rest = arguments
    if len(rest) == 2:
        make_shipped(Path(folder), rest[0], int(rest[1]))
    else:
        make_checkpoint(Path(folder), LlamaShape(**json.loads("".join(rest) or "{}")))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except FinepageError as error:
        sys.exit(f"ds_finepage: {error}")
