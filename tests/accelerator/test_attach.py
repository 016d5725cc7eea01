"""Attach and detach on an accelerator: parameters, buffers, devices that cannot be used."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import ds_finepage
from ds_finepage.errors import ConfigError
from ds_finepage.execution.device import DeviceMemoryError, default_device, device_of
from ds_finepage.execution.masters import weights_of
from ds_finepage.execution.measure import OpMeter
from ds_finepage.execution.meter import DeviceMeter
from tests.accelerator.subjects import attached
from tests.integration.families import logits, make_model, token_ids, tokens
from tests.unit.execution.test_measure import product


class WithBuffers(nn.Module):
    """Two parts share a buffer, and the forward changes another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        for part in (self.first, self.second):
            part.register_buffer("shared", torch.ones(8) if part is self.first else None)
        self.second.shared = self.first.shared
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return self.second(self.first(x) + self.first.shared) * self.second.shared


def test_the_accelerator_is_the_default_device(device: torch.device) -> None:
    assert default_device().type == device.type
    assert device_of(device).memory_info()[0] > 0


def test_parameters_show_pinned_masters_without_device_bytes(device: torch.device) -> None:
    model = make_model("llama")
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    with DeviceMeter(device) as meter:
        handle = attached(model, device)
    assert meter.peak_bytes < handle.stats.weight_bytes // 4
    for name, parameter in model.named_parameters():
        assert parameter.device.type == device.type
        assert torch.equal(parameter.cpu(), values[name])
        assert parameter.data_ptr() == handle._weights.masters[name].data_ptr()
    assert {k: v.cpu().tolist() for k, v in model.state_dict().items()}.keys() >= values.keys()
    handle.detach()
    for name, parameter in model.named_parameters():
        assert parameter.device.type == "cpu" and torch.equal(parameter, values[name])


def test_buffers_move_to_the_device_and_come_back_with_their_values(device: torch.device) -> None:
    module = WithBuffers()
    before = dict(module.named_buffers(remove_duplicate=False))
    handle = attached(module, device)
    moved = dict(module.named_buffers(remove_duplicate=False))
    assert {b.device.type for b in moved.values()} == {device.type}
    assert moved["first.shared"] is moved["second.shared"]
    with torch.no_grad():
        module(torch.ones(1, 8, device=device))
    handle.detach()
    assert {n: id(b) for n, b in module.named_buffers(remove_duplicate=False)} == {
        n: id(b) for n, b in before.items()
    }
    assert module.calls.tolist() == [1]


def test_a_write_to_a_parameter_on_the_device_takes_effect_in_the_next_call(
    device: torch.device,
) -> None:
    torch._dynamo.reset()
    ids = token_ids(7)
    model, changed = (make_model("llama", num_hidden_layers=1) for _ in range(2))
    handle = attached(model, device)
    logits(model, ids.to(device))
    handle.replan(budget_bytes=handle.stats.min_budget_bytes)
    with torch.no_grad():
        for each in (model, changed):
            each.lm_head.weight.mul_(2)
            each.lm_head.weight.data.add_(1)
    assert torch.equal(logits(model, ids.to(device)).cpu(), logits(changed, ids))
    handle.detach()
    assert torch.equal(logits(model, ids), logits(changed, ids))


def test_two_devices_of_a_process_run_a_model_each(card: Any) -> None:
    """Each model keeps to its own device, whichever device is torch's current one."""
    torch._dynamo.reset()
    ids = token_ids(5)
    models = [make_model(family, num_hidden_layers=1) for family in ("llama", "opt")]
    plain = [tokens(m, ids, 3, cache=None) for m in models]
    card.set_num_devices(2)
    try:
        places = [torch.device("slowcard", n) for n in range(2)]
        handles = [attached(m, p) for m, p in zip(models, places, strict=True)]
        for turn in range(3):
            for model, handle, place, wanted in zip(models, handles, places, plain, strict=True):
                gc.collect()  # what the last turn has left goes now, not meanwhile
                torch.accelerator.synchronize()
                others = [torch.accelerator.memory_allocated(p) for p in places if p != place]
                with DeviceMeter(place) as meter:
                    assert torch.equal(tokens(model, ids.to(place), 3, cache=None).cpu(), wanted)
                assert 0 < meter.peak_bytes <= handle.stats.budget_bytes, turn
                assert others == [
                    torch.accelerator.memory_allocated(p) for p in places if p != place
                ]
                handle.replan(budget_bytes=handle.stats.min_budget_bytes)
        for handle in handles:
            handle.detach()
    finally:
        card.set_num_devices(1)
    assert all(
        torch.equal(tokens(m, ids, 3, cache=None), w) for m, w in zip(models, plain, strict=True)
    )


def test_out_of_memory_while_attaching_leaves_the_module_as_it_was(
    device: torch.device, card: Any
) -> None:
    module = WithBuffers()
    before = {n: t.clone() for n, t in module.state_dict().items()}
    gc.collect()
    start = torch.accelerator.memory_allocated(device)
    watched = vars(nn.Parameter).get("data")  # by attached models of other tests
    num_failed = 0
    for nth in range(1, 60):
        card.fail_nth("alloc", nth)
        try:
            ds_finepage.attach(module, device_budget="64KiB", device=device).detach()
        except DeviceMemoryError as error:
            assert "device_budget 64.00 KiB" in str(error)
            num_failed += 1
        card.fail_nth("alloc", 0)
        now = module.state_dict()
        assert {t.device.type for t in now.values()} == {"cpu"}, nth
        assert all(torch.equal(now[n], value) for n, value in before.items()), nth
        assert vars(nn.Parameter).get("data") is watched
        assert torch.accelerator.memory_allocated(device) == start, nth
    assert num_failed >= 5


def test_a_trial_without_room_is_made_again(device: torch.device, card: Any) -> None:
    graph, meter = product().graph(), OpMeter(device)
    card.fail_nth("alloc", 5)  # the first ones are for all trials
    assert meter.with_costs(graph).tasks[0].time_ns is None
    card.reset_switches()
    times: list[int] = []
    for _ in range(2):
        again = meter.with_costs(graph, make_room=lambda: times.append(1))
        assert again.tasks[0].time_ns is not None and times == [1]


def test_masters_are_the_only_copies_of_weights(device: torch.device) -> None:
    parameter = nn.Parameter(torch.rand(4, 4))
    (weight,) = weights_of({"w": parameter}, device)
    kept = [cell.cell_contents for cell in weight.restore.__closure__ or ()]
    assert not [t for t in kept if isinstance(t, torch.Tensor) and t is not parameter]


def test_a_budget_above_the_device_is_refused(device: torch.device, card: Any) -> None:
    card.set_capacity(1 << 20)
    with pytest.raises(ConfigError, match="the device has 1.00 MiB"):
        attached(WithBuffers(), device, device_budget="2MiB")


class WithTables(nn.Module):
    """Reads a large buffer and changes another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1 << 15))
        self.register_buffer("table", torch.linspace(0, 1, 1 << 15))
        self.register_buffer("seen", torch.zeros(1 << 15))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        return x * self.weight + self.table + self.seen


def test_large_buffers_are_paged_unless_the_forward_changes_them(device: torch.device) -> None:
    model, same = WithTables(), WithTables()
    table, seen = model.table, model.seen
    handle = attached(model, device)
    assert model.table.data_ptr() == handle._weights.masters["table"].data_ptr()
    shown = model.seen.data_ptr()
    with torch.no_grad():
        for _ in range(2):
            x = torch.ones(1 << 15)
            assert torch.equal(model(x.to(device)).cpu(), same(x))
    assert set(handle._weights.masters) == {"weight", "table"}
    assert model.seen.device.type == device.type and model.seen.data_ptr() != shown
    assert torch.equal(model.state_dict()["table"].cpu(), same.table)
    handle.detach()
    assert model.table is table and model.seen is seen
    assert table.device.type == seen.device.type == "cpu"
    assert torch.equal(table, same.table) and torch.equal(seen, same.seen)


def test_large_buffers_of_the_device_come_back_to_it(device: torch.device) -> None:
    model = WithTables().to(device)
    handle = attached(model, device)
    handle.detach()
    assert model.table.device.type == model.seen.device.type == device.type
