"""Makes a small Llama checkpoint with a tokenizer; nothing is downloaded.

    python -m ds_finepage.cli.checkpoint FOLDER [SHAPE_AS_JSON]

Weights are random, from a fixed seed, and spread widely enough for greedy tokens to vary. The
tokenizer is trained on the source of this package.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import ds_finepage

SEED = 0
WEIGHT_STD = 0.05
"""With the 0.02 of transformers the model repeats one token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama model; the default ones make 163 MB of bfloat16 weights."""

    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 6
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    vocab_size: int = 2048
    max_position_embeddings: int = 2048


def make_checkpoint(folder: Path, shape: LlamaShape) -> None:
    """Write a checkpoint that ``from_pretrained`` reads: bfloat16 safetensors and a tokenizer."""
    import torch
    import transformers

    make_tokenizer(folder, shape.vocab_size)
    torch.manual_seed(SEED)
    config = transformers.LlamaConfig(
        **asdict(shape),
        initializer_range=WEIGHT_STD,
        bos_token_id=None,
        eos_token_id=None,  # so that no run stops early
        pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(folder)


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
    files = sorted(map(str, Path(ds_finepage.__file__).parent.rglob("*.py")))
    tokenizer.train(files, trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[1]), LlamaShape(**json.loads("".join(sys.argv[2:]) or "{}")))
