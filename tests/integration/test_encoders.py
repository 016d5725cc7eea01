"""Pipelines of encoders give what they give in plain transformers, bit by bit, at any budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf

from tests.integration import vocabularies
from tests.integration.parity import same_at_every_budget

HIDDEN = 64
TEXTS = [
    "the plan is made before it runs",
    "weights never change, so evicting one costs nothing",
    "budget",
]

VOCABULARIES: dict[str, Callable[[], hf.PreTrainedTokenizerFast]] = {
    "Bert": vocabularies.wordpiece,
    "Roberta": vocabularies.byte_pairs,
    "DistilBert": vocabularies.wordpiece,
}
HEADS = {
    "feature-extraction": "Model",
    "fill-mask": "ForMaskedLM",
    "text-classification": "ForSequenceClassification",
}


def make(family: str, task: str) -> Any:
    """Make a pipeline around a tiny random model."""
    tokenizer = VOCABULARIES[family]()
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 2 * HIDDEN,
    }
    if family == "DistilBert":
        sizes = {"dim": HIDDEN, "n_layers": 2, "n_heads": 4, "hidden_dim": 2 * HIDDEN}
    torch.manual_seed(0)
    config = getattr(hf, f"{family}Config")(
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    model = getattr(hf, family + HEADS[task])(config).eval()
    return hf.pipeline(task, model=model, tokenizer=tokenizer, device="cpu")


@pytest.mark.parametrize(
    ("family", "task"),
    [
        ("Bert", "feature-extraction"),
        ("Roberta", "fill-mask"),
        ("DistilBert", "text-classification"),
    ],
)
def test_a_pipeline_gives_what_it_gives_without_finepage(family: str, task: str) -> None:
    pipe = make(family, task)
    texts, options = TEXTS, {}
    if task == "feature-extraction":
        options = {"return_tensors": True}
    elif task == "text-classification":
        options = {"top_k": None}
    else:
        texts = [f"{text} {pipe.tokenizer.mask_token}" for text in TEXTS]

    def run() -> list[Any]:
        return [pipe(texts[0], **options), pipe(texts, batch_size=len(texts), **options)]

    stats = same_at_every_budget(pipe.model, run)
    assert stats.num_captures == 2  # one text, and all of them padded
