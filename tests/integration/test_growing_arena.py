"""After a long prompt, the arena grows again for short ones."""

from __future__ import annotations

import pytest
import torch

from ds_finepage.api import attach
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.runtime import binder
from tests.integration.families import make_model, token_ids


def test_short_prompts_copy_little_again_after_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binder, "REBIND_NS", 0)
    llama = make_model("llama", num_hidden_layers=4)

    def generate(num_tokens: int) -> torch.Tensor:
        new: dict[str, int] = {"max_new_tokens": 24, "min_new_tokens": 24}
        found: torch.Tensor = llama.generate(token_ids(num_tokens), do_sample=False, **new)
        return found

    expected = {n: generate(n) for n in (5, 100)}
    handle = attach(llama, device_budget="60%weights", device="cpu")
    copied = []
    with DeviceMeter(torch.device("cpu")) as meter:
        for num_tokens in (5, 5, 100, 5, 5, 100, 5, 5):
            start = handle.stats.reloaded_bytes
            assert torch.equal(generate(num_tokens), expected[num_tokens])
            copied.append(handle.stats.reloaded_bytes - start)
    assert meter.peak_bytes <= handle.stats.budget_bytes
    long, short = copied[2], copied[1]
    assert copied[4] < short + (long - short) / 4 > copied[7]
    assert not handle.stats.unplanned_reasons
