"""What needs an accelerator: equality, the budget, and a host that never waits in a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import ds_finepage
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.execution.reload_sources import ReloadSources
from tests.accelerator.subjects import AMPLE, plain_on
from tests.integration.families import logits, make_model, token_ids, tokens

NEW_TOKENS = 6


def plain_results(model: Any, ids: torch.Tensor, device: torch.device, **options: Any) -> Any:
    """Return logits and tokens of plain transformers, in host memory."""
    where = plain_on(device)
    plain = model.to(where)
    plain.generation_config.disable_compile = True
    found = tokens(plain, ids.to(where), NEW_TOKENS, **options)
    return logits(plain, ids.to(where)).cpu(), found.cpu()


def test_tokens_are_equal_and_the_budget_holds_from_attach_to_detach(device: torch.device) -> None:
    torch._dynamo.reset()
    ids, given = token_ids(7), token_ids(7).to(device)
    wanted, wanted_tokens = plain_results(make_model("llama"), ids, device)
    model = make_model("llama")
    handle = ds_finepage.attach(model, device_budget=AMPLE, device=device)
    logits(model, given)
    tokens(model, given, NEW_TOKENS)
    least, needed = handle.stats.min_budget_bytes, handle.stats.needed_budget_bytes
    handle.detach()
    for budget in (least, (least + needed) // 2):
        model = make_model("llama")
        torch._dynamo.reset()
        with DeviceMeter(device) as meter:
            handle = ds_finepage.attach(model, device_budget=budget, device=device)
            assert torch.equal(logits(model, given).cpu(), wanted)
            assert torch.equal(tokens(model, given, NEW_TOKENS).cpu(), wanted_tokens)
            handle.detach()
        assert meter.peak_bytes <= budget


def test_the_host_never_waits_inside_a_pass(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.reset()
    set_mode = torch.get_device_module(device).set_sync_debug_mode
    gather = ReloadSources.gather_rows

    def gather_before_the_pass(sources: ReloadSources, args: Sequence[Any]) -> None:
        """Let the host have the indices of an embedding, which it waits for before a pass."""
        set_mode("default")
        gather(sources, args)
        set_mode("error")

    monkeypatch.setattr(ReloadSources, "gather_rows", gather_before_the_pass)
    ids = token_ids(7).to(device)
    model = make_model("gpt2", torch.bfloat16, num_hidden_layers=1)
    handle = ds_finepage.attach(model, device_budget=AMPLE, device=device)
    logits(model, ids)
    least, needed = handle.stats.min_budget_bytes, handle.stats.needed_budget_bytes
    handle.replan(budget_bytes=(least + needed) // 2)
    logits(model, ids)
    set_mode("error")
    try:
        logits(model, ids)
    finally:
        set_mode("default")
