"""More decoders than those of test_families, each once: one forward, and both kinds of cache."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests.integration.families import MORE_FAMILIES, logits, make_model, token_ids, tokens
from tests.integration.parity import same_at_every_budget

PROMPT = token_ids(7)
IN_HALF = ("qwen3_moe",)  # whose experts go another way in half precision


@pytest.mark.parametrize(
    ("family", "dtype"),
    [(f, torch.float32) for f in MORE_FAMILIES] + [(f, torch.bfloat16) for f in IN_HALF],
    ids=lambda p: str(p).removeprefix("torch."),
)
def test_results_are_those_of_plain_transformers(family: str, dtype: torch.dtype) -> None:
    model = make_model(family, dtype)

    def run() -> list[Any]:
        with warnings.catch_warnings():
            # transformers asks for torch's version inside the experts' forward.
            warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`")
            # BLOOM's activation is an autograd function, of which Dynamo makes an object.
            warnings.filterwarnings("ignore", ".*Function'> should not be instantiated")
            return [
                logits(model, PROMPT),
                tokens(model, PROMPT, 5),
                tokens(model, PROMPT, 3, cache=None),
            ]

    same_at_every_budget(model, run, budgets=("min",))
