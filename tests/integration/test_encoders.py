"""A pipeline of an encoder gives what it gives in plain transformers, bit by bit, at any budget."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf

from tests.integration.parity import same_at_every_budget
from tests.integration.vocabularies import wordpiece

TEXTS = [
    "the plan is made before it [MASK]",
    "weights never change, so evicting one costs [MASK]",
    "[MASK]",
]


def test_a_pipeline_gives_what_it_gives_without_finepage() -> None:
    tokenizer = wordpiece()
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
    )
    model = hf.BertForMaskedLM(config).eval()
    pipe = hf.pipeline("fill-mask", model=model, tokenizer=tokenizer, device="cpu")

    def run() -> list[Any]:
        return [pipe(TEXTS[0]), pipe(TEXTS, batch_size=len(TEXTS))]

    stats = same_at_every_budget(model, run)
    assert stats.num_captures == 2  # one text, and all of them padded
