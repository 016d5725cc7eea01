"""What the room of a draft is worth to its model."""

from __future__ import annotations

import pytest
import torch

from ds_finepage.api import attach
from tests.integration.families import make_model, opposite, token_ids

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.mark.parametrize(("percent", "share"), [(100, 1 / 3), (140, 1 / 3), (160, 0)])
def test_the_room_of_a_draft_has_its_price(percent: int, share: float) -> None:
    model = make_model("llama", num_hidden_layers=2)
    draft = make_model("llama", num_hidden_layers=1)  # of half the bytes and a little more
    handle = attach(model, device_budget=f"{percent}%weights", draft=draft, device="cpu")
    found = handle._calls.assistance.draft
    assert found is not None and found.generation.price.room_share == pytest.approx(share)
    handle.detach()


def test_a_draft_that_is_never_right_soon_rests() -> None:
    model = make_model("llama", num_hidden_layers=2)
    given = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(token_ids(9), **given)
    handle = attach(model, device_budget="150%weights", draft=opposite(model), device="cpu")
    assert torch.equal(model.generate(token_ids(9), **given), expected)
    start = handle.stats.num_drafted
    assert torch.equal(model.generate(token_ids(9), **given), expected)
    assert handle.stats.num_drafted - start <= 3
    handle.detach()
