"""The prompts of a comparison: text for a model with a tokenizer, else random tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ds_finepage.compare.checkpoint import package_sources
from ds_finepage.errors import ConfigError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
SEED = 0

Prompts = tuple[tuple[int, ...], ...]


def make_prompts(model_dir: Path, *, vocab_size: int, batch: int, prompt_tokens: int) -> Prompts:
    """Return token ids, a row for each sequence; the rows differ.

    Args:
        model_dir: The folder of the checkpoint.
        vocab_size: Rows of the model's embedding.
        batch: Sequences in the batch.
        prompt_tokens: Tokens of each prompt.

    Raises:
        ConfigError: The tokenizer cannot be read, or does not belong to the model.
    """
    num_tokens = batch * prompt_tokens
    if any((model_dir / name).exists() for name in TOKENIZER_FILES):
        ids = _ids_of_text(_tokenizer(model_dir, vocab_size), num_tokens)
    else:
        import torch

        generator = torch.Generator().manual_seed(SEED)
        ids = torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()
    return tuple(tuple(ids[i * prompt_tokens : (i + 1) * prompt_tokens]) for i in range(batch))


def _tokenizer(model_dir: Path, vocab_size: int) -> Any:
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(model_dir)
    except Exception as error:  # each tokenizer class checks in its own way
        raise ConfigError(f"the tokenizer in {model_dir} cannot be read: {error}") from error
    if len(found) > vocab_size:
        raise ConfigError(
            f"the tokenizer in {model_dir} has {len(found)} tokens, and the model's embedding "
            f"{vocab_size} rows. It belongs to another model. Replace it, or take its files away: "
            "the prompts are then random."
        )
    return found


def _ids_of_text(tokenizer: Any, num_tokens: int) -> list[int]:
    """Tokenize the source of this package, from its start, until there are enough tokens."""
    ids: list[int] = []
    while len(ids) < num_tokens:
        for path in package_sources():
            text = path.read_text(encoding="utf-8")
            ids += tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(ids) >= num_tokens:
                break
        if not ids:
            raise ConfigError("the tokenizer makes no tokens of plain text")
    return ids
