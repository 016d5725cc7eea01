"""What Dynamo remembers of one model does not keep the next one of its class from plans."""

from __future__ import annotations

import torch

from ds_finepage.api import attach
from tests.integration.families import make_model, token_ids, tokens


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
