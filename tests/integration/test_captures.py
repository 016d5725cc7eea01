"""What a generation captures depends on its shapes, never on how many tokens it makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ds_finepage.api import attach
from ds_finepage.runtime.handle import Handle
from tests.integration.families import SLIDING_WINDOW, make_model, token_ids, tokens


@dataclass
class Counted:
    """A model whose generations are compared with the plain ones, and their captures counted."""

    model: Any
    plain: dict[tuple[int, int], torch.Tensor]
    handle: Handle
    num_captures: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def generate(self, length: int, num_tokens: int) -> int:
        """Generate, check the tokens, and return the number of new captures."""
        before = self.handle.stats.num_captures
        found = tokens(self.model, token_ids(length), num_tokens)
        assert torch.equal(found, self.plain[length, num_tokens])
        return self.handle.stats.num_captures - before


RUNS = ((7, 16), (7, 32), (30, 32), (5, 9))


@pytest.fixture(scope="module", params=("llama", "mistral"))
def counted(request: pytest.FixtureRequest) -> Iterator[Counted]:
    torch._dynamo.reset()
    model = make_model(request.param, num_hidden_layers=1)
    plain = {}
    for length, num_tokens in RUNS:
        model._previous_max_cache_length = -1  # what transformers remembers of the longest run
        plain[length, num_tokens] = tokens(model, token_ids(length), num_tokens)
    model._previous_max_cache_length = -1
    handle = attach(model, device_budget="64MiB", device="cpu")
    yield Counted(model, plain, handle)
    handle.detach()
    assert handle.stats.num_unplanned_graphs == handle.stats.num_unplanned_modules == 0


def test_captures_do_not_grow_with_the_tokens(counted: Counted) -> None:
    few, many = counted.generate(7, 16), counted.generate(7, 32)
    is_other = counted.model.config.model_type == "mistral"
    if is_other:
        # A prefill, a step, and a step whose window has filled up on the way. The cache is as long
        # as the window, so a longer generation has no other shapes.
        assert 7 < SLIDING_WINDOW < 7 + 16
        assert (few, many) == (3, 0)
    else:
        assert few == many == 2  # a prefill and a step, over a cache of another length
    assert counted.generate(7, 32) == 0
    assert len(counted.handle.stats.passes) == counted.handle.stats.num_captures
    # Lengths are symbols by now; a prompt beyond mistral's window is another kind of pass.
    assert counted.generate(30, 32) in (0, int(is_other))
    assert counted.generate(30, 32) == 0
    assert counted.generate(5, 9) <= 1  # its prefill; decoding is the same step
    assert counted.generate(5, 9) == 0


def test_models_with_other_numbers_have_plans_too() -> None:
    """The heads differ in width, so attention has another scale."""
    torch._dynamo.reset()
    for num_heads in (2, 4):
        sizes = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
        model = make_model("llama", num_hidden_layers=1, **sizes)
        plain = tokens(model, token_ids(7), 3)
        handle = attach(model, device_budget="64MiB", device="cpu")
        assert torch.equal(tokens(model, token_ids(7), 3), plain)
        handle.detach()
        assert handle.stats.num_unplanned_graphs == 0, handle.stats.unplanned_reasons
