"""What only a GPU can show: equality, the budget, and a host that never waits inside a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

import ds_finepage
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.execution.reload_sources import ReloadSources
from ds_finepage.runtime.handle import Handle
from tests.integration.families import FAMILIES, SLOW_LINK, make_model, token_ids

pytestmark = pytest.mark.gpu

NEW_TOKENS = 12


@pytest.fixture(params=["llama", "gpt2"])
def family(request: pytest.FixtureRequest) -> Iterator[str]:
    assert request.param in FAMILIES
    torch._dynamo.reset()
    yield request.param
    torch._dynamo.reset()


def generate(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    found = model.generate(
        ids, max_new_tokens=NEW_TOKENS, do_sample=False, cache_implementation="static"
    )
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_equal_and_the_budget_holds(family: str, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    ids = token_ids(7).to(device)
    plain = make_model(family, dtype).to(device)
    plain.generation_config.disable_compile = True
    with torch.no_grad():
        logits, tokens = plain(ids).logits, generate(plain, ids)
    del plain
    handle = attach_twice(family, dtype, ids)
    least, needed = handle.stats.min_budget_bytes, handle.stats.needed_budget_bytes
    handle.detach()
    for budget in (least, (least + needed) // 2, needed):
        model = make_model(family, dtype)
        torch._dynamo.reset()
        with DeviceMeter(device) as meter:
            handle = ds_finepage.attach(model, device_budget=budget, device=device)
            with torch.no_grad():
                assert torch.equal(model(ids).logits, logits)
                assert torch.equal(generate(model, ids), tokens)
            handle.detach()
        assert meter.peak_bytes <= budget


def attach_twice(family: str, dtype: torch.dtype, ids: torch.Tensor) -> Handle:
    """Attach with room for everything and run once, to learn what the passes need."""
    model = make_model(family, dtype)
    handle = ds_finepage.attach(model, device_budget="2GiB", device="cuda")
    with torch.no_grad():
        model(ids)
        generate(model, ids)
    return handle


def test_the_host_never_waits_inside_a_pass(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gather = ReloadSources.gather_rows

    def gather_before_the_pass(sources: ReloadSources, args: Sequence[Any]) -> None:
        """Let the host have the indices of an embedding, which it waits for before a pass."""
        torch.cuda.set_sync_debug_mode("default")
        gather(sources, args)
        torch.cuda.set_sync_debug_mode("error")

    monkeypatch.setattr(ReloadSources, "gather_rows", gather_before_the_pass)
    ids = token_ids(7).cuda()
    model = make_model(family, torch.bfloat16)
    handle = ds_finepage.attach(model, device_budget="2GiB", device="cuda")
    with torch.no_grad():
        model(ids)
        handle.replan(
            budget_bytes=(handle.stats.min_budget_bytes + handle.stats.needed_budget_bytes) // 2
        )
        model(ids)
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(ids)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    handle.detach()


def grow(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    found = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert isinstance(found, torch.Tensor)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_that_grows_and_one_in_host_memory_give_the_same_tokens(
    dtype: torch.dtype,
) -> None:
    torch._dynamo.reset()
    device, ids = torch.device("cuda"), token_ids(100, batch=6).cuda()
    plain = make_model("llama", dtype, num_hidden_layers=10).to(device)
    plain.generation_config.disable_compile = True
    tokens = grow(plain, ids)
    del plain
    model = make_model("llama", dtype, num_hidden_layers=10)
    handle = ds_finepage.attach(model, device_budget="2GiB", device=device)
    assert torch.equal(grow(model, ids), tokens)
    assert handle.stats.num_resident_runs
    handle.register_op_hook()  # planned from here on
    assert torch.equal(grow(model, ids), tokens)
    held = 2 * 10 * 6 * (100 + NEW_TOKENS) * 64 * dtype.itemsize
    overhead = handle.stats.min_budget_bytes - 2 * held  # what libraries take, among others
    handle.replan(budget_bytes=max(held, overhead))
    with DeviceMeter(device) as meter:
        assert torch.equal(grow(model, ids), tokens)
    assert meter.peak_bytes <= handle.stats.budget_bytes
    handle.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_are_not_chosen_are_not_brought_in(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    device = torch.device("cuda")
    ids = token_ids(7).to(device)
    plain = make_model("mixtral", dtype, num_local_experts=8).to(device)
    plain.generation_config.disable_compile = True
    with torch.no_grad():
        tokens = grow(plain, ids)
    del plain
    model = make_model("mixtral", dtype, num_local_experts=8)
    handle = ds_finepage.attach(model, device_budget="2GiB", device=device, profile=SLOW_LINK)
    with torch.no_grad():
        grow(model, ids)
        handle.replan(budget_bytes=handle.stats.min_budget_bytes)
        with DeviceMeter(device) as meter:
            assert torch.equal(grow(model, ids), tokens)
    assert meter.peak_bytes <= handle.stats.budget_bytes
    step = max(handle.stats.passes, key=lambda p: p.num_runs)
    experts = sum(p.numel() * p.element_size() for p in model.parameters() if p.dim() == 3)
    assert step.last_reloaded_bytes <= experts // 4 + handle.stats.weight_bytes - experts
    handle.detach()


def test_parameters_show_pinned_masters_without_device_bytes() -> None:
    device = torch.device("cuda")
    model = make_model("llama")
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    with DeviceMeter(device) as meter:
        handle = ds_finepage.attach(model, device_budget="2GiB", device=device, profile=SLOW_LINK)
    assert meter.peak_bytes < handle.stats.weight_bytes
    for name, parameter in model.named_parameters():
        assert parameter.is_cuda and torch.equal(parameter.cpu(), values[name])
        assert parameter.data_ptr() == handle._weights.masters[name].data_ptr()
    assert {k: v.cpu().tolist() for k, v in model.state_dict().items()}.keys() >= values.keys()
    handle.detach()
    assert not next(model.parameters()).is_cuda


def test_a_write_to_a_parameter_on_the_device_takes_effect_in_the_next_call() -> None:
    torch._dynamo.reset()
    device = torch.device("cuda")
    ids = token_ids(7).to(device)
    model, changed = make_model("llama"), make_model("llama").to(device)
    handle = ds_finepage.attach(model, device_budget="2GiB", device=device, profile=SLOW_LINK)
    with torch.no_grad():
        model(ids)
        handle.replan(budget_bytes=handle.stats.min_budget_bytes)
        for each in (model, changed):
            each.lm_head.weight.mul_(2)
            each.lm_head.weight.data.add_(1)
        assert torch.equal(model(ids).logits, changed(ids).logits)
    handle.detach()
