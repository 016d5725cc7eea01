"""What an attached model takes from quick tracing, and what it must not lose by it."""

from __future__ import annotations

import pytest
import torch

from ds_finepage.api import attach
from ds_finepage.capture.tracing import OwnHooks


def chain() -> torch.nn.Sequential:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).eval()


def test_an_attached_model_hides_its_hooks_once_for_each_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x, hidden = chain(), torch.ones(2, 64), []
    hide = OwnHooks.hide

    def counted(hooks: OwnHooks) -> None:
        hide(hooks)
        hidden.append(len(hooks._hidden))

    monkeypatch.setattr(OwnHooks, "hide", counted)
    handle = attach(model, device_budget="110KiB", device="cpu")
    for _ in range(3):
        model(x)
    assert hidden == [12]  # three dictionaries of each of four modules
    handle.detach()


def test_a_hook_that_comes_after_the_first_call_runs() -> None:
    model, x = chain(), torch.ones(2, 64)
    handle = attach(model, device_budget="110KiB", device="cpu")
    plain = model(x)
    hook = model[3].register_forward_hook(lambda module, args, output: output * 2)
    assert torch.equal(model(x), plain * 2)
    hook.remove()
    assert torch.equal(model(x), plain)
    assert handle.stats.num_unplanned_modules == 0
    handle.detach()
