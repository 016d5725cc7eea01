"""Pinned memory of our own under an attached model: exact, once, and given back."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from ds_finepage.execution import device as device_module
from ds_finepage.execution.device import Accelerator, device_of
from ds_finepage.execution.host_memory import Registration
from ds_finepage.execution.masters import weights_of
from tests.accelerator.subjects import attached
from tests.integration.families import logits, make_model, token_ids


@pytest.fixture
def registered(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pin every block by registering it; return a function that tells the bytes since then."""
    if not hasattr(torch.get_device_module(device), "cudart"):
        pytest.skip("the device pins nothing in place")
    monkeypatch.setattr(device_module, "LEAST_BYTES", 1)
    torch.empty(1, pin_memory=True)  # torch knows no pinned memory before it has a context
    gc.collect()
    before = Registration.total_bytes
    return lambda: Registration.total_bytes - before


def test_masters_are_registered_until_no_tensor_has_them(
    device: torch.device, registered: Any
) -> None:
    model = make_model("llama")
    ids = token_ids(7)
    expected = logits(model, ids)
    handle = attached(model, device)
    assert registered() >= handle.stats.weight_bytes
    assert torch.allclose(logits(model, ids.to(device)).cpu(), expected, atol=1e-5)
    handle.detach()
    assert registered() >= sum(p.nbytes for p in model.parameters())
    assert torch.equal(logits(model, ids), expected)
    del model, handle
    gc.collect()
    torch._dynamo.reset()
    gc.collect()
    assert registered() == 0


def test_a_weight_is_there_twice_only_while_it_is_copied(
    device: torch.device, registered: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (torch.nn.Parameter(torch.full((64,), float(n))) for n in range(2))
    storages = [weakref.ref(p.untyped_storage()) for p in (first, second)]
    seen: list[list[bool]] = []
    pinned = Accelerator.pinned

    def watched(self: Accelerator, host: torch.Tensor) -> torch.Tensor:
        gc.collect()
        seen.append([at() is None for at in storages])
        return pinned(self, host)

    monkeypatch.setattr(Accelerator, "pinned", watched)
    taken = weights_of({"first": first, "second": second}, device)
    assert [w.value.tolist() for w in taken] == [[0.0] * 64, [1.0] * 64]
    assert first.tolist() == [0.0] * 64 and first.data_ptr() == taken[0].master.data_ptr()


def test_a_weight_on_the_device_stays_there_until_the_model_is_attached(
    device: torch.device, registered: Any
) -> None:
    weight = torch.nn.Parameter(torch.ones(64, device=device))
    weights_of({"weight": weight}, device)
    assert weight.device.type == device.type


def test_memory_that_is_shown_is_registered_while_any_view_of_it_lives(
    device: torch.device, registered: Any
) -> None:
    host = torch.arange(100, dtype=torch.uint8)
    first = device_of(device).show(host)
    second = device_of(device).show(host)
    assert registered() > 0 and host.is_pinned()
    assert torch.equal(first.cpu(), host)
    del first
    gc.collect()
    assert registered() > 0 and torch.equal(second.cpu(), host)
    del second
    gc.collect()
    assert registered() == 0 and not host.is_pinned()
