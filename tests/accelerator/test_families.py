"""Results on an accelerator are those of plain transformers, bit by bit, at any budget."""

from __future__ import annotations

import pytest
import torch

from tests.accelerator.subjects import subject

CASES = (
    ("llama", torch.float32),
    ("gpt2", torch.bfloat16),
    ("mixtral", torch.float32),
)


@pytest.mark.parametrize(("family", "dtype"), CASES, ids=str)
def test_results_are_equal_and_the_budget_holds(
    device: torch.device, family: str, dtype: torch.dtype
) -> None:
    """Under poison, and delays on the device, at budgets from the least to all weights."""
    torch._dynamo.reset()
    found = subject(device, family, dtype, num_hidden_layers=2)
    for seed, budget_bytes in enumerate(found.budgets):
        found.check_at(budget_bytes, seed=seed)
    found.detach()
