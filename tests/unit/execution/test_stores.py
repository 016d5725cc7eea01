"""Host masters: taken from a module, shown by its parameters, and given back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_finepage.errors import StoreError
from ds_finepage.execution.arena import byte_view
from ds_finepage.execution.stores import WeightChanges, WeightTable
from tests.unit.execution.parameters import CPU, Model, attached, weights_of_module

NONE = WeightChanges()

every_parameter = pytest.mark.parametrize("name", [n for n, _ in Model().named_parameters()])


# --- taking over -----------------------------------------------------------------------------


def test_a_dense_master_is_the_parameters_own_memory() -> None:
    """One model copy is enough."""
    model = Model()
    masters = {w.name: w.master for w in weights_of_module(model, CPU)}
    for name in ("plain", "turned", "short", "number", "whole"):
        assert masters[name].data_ptr() == getattr(model, name).data_ptr()


def test_a_parameter_that_is_part_of_a_storage_has_its_own_part_as_master() -> None:
    module = nn.Module()
    module.part = nn.Parameter(torch.arange(12.0)[4:7])
    (weight,) = weights_of_module(module, CPU)
    assert weight.master.view(torch.float32).tolist() == [4.0, 5.0, 6.0]


def test_tied_weights_are_taken_once_under_their_first_name() -> None:
    module = nn.Module()
    module.embed = nn.Embedding(4, 2)
    module.head = nn.Linear(2, 4, bias=False)
    module.head.weight = module.embed.weight
    table = attached(module)
    assert list(table.masters) == ["embed.weight"]
    assert table.nbytes == 4 * 2 * 4
    assert module.head.weight is module.embed.weight


def test_a_parameter_on_the_meta_device_is_refused_by_name() -> None:
    with pytest.raises(StoreError) as caught:
        weights_of_module(nn.Sequential(nn.Linear(2, 2, device="meta")), CPU)
    assert str(caught.value) == (
        "parameter 0.weight is on the meta device and has no data. Load the weights first, "
        "all of them into host memory: a device_map that offloads leaves some out."
    )


# --- in place of the parameter ---------------------------------------------------------------


@every_parameter
def test_an_installed_parameter_looks_the_same_and_is_its_master(name: str) -> None:
    model = Model()
    parameter = getattr(model, name)
    needs_grad, dtype, value = parameter.requires_grad, parameter.dtype, parameter.detach().clone()
    table = attached(model)
    assert getattr(model, name) is parameter
    assert (parameter.requires_grad, parameter.dtype) == (needs_grad, dtype)
    assert torch.equal(parameter, value) and parameter.device == CPU
    assert parameter.data_ptr() == table.masters[name].data_ptr()


def test_an_installed_parameter_is_dense() -> None:
    model = Model()
    attached(model)
    assert model.turned.stride() == (1, 6)  # as it was
    assert model.sparse.stride() == (3, 1)  # it was (6, 2)


def test_installing_in_inference_mode_leaves_ordinary_parameters() -> None:
    model = Model()
    with torch.inference_mode():
        attached(model)
    assert not model.plain.is_inference()


@every_parameter
@pytest.mark.parametrize("written", [False, True])
def test_restore_gives_back_the_very_memory(name: str, written: bool) -> None:
    model = Model()
    parameter = getattr(model, name)
    address, stride, value = parameter.data_ptr(), parameter.stride(), parameter.detach().clone()
    table = attached(model)
    if written:
        with torch.no_grad():
            parameter.copy_(value.fill_(7))
    table.restore()
    assert getattr(model, name) is parameter
    assert (parameter.data_ptr(), parameter.stride()) == (address, stride)
    assert torch.equal(parameter, value)


def test_restore_gives_back_the_new_tensor_of_a_parameter(model: Model, table: WeightTable) -> None:
    model.plain.data = torch.ones(2, 2, dtype=torch.float16)
    table.restore()
    assert torch.equal(model.plain, torch.ones(2, 2, dtype=torch.float16))


# --- outside of any plan ---------------------------------------------------------------------


@every_parameter
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fetch_returns_a_full_copy(
    model: Model, table: WeightTable, name: str, mode: Callable[[], Any]
) -> None:
    value = getattr(model, name).detach().clone(memory_format=torch.contiguous_format)
    with mode():
        found = table.fetch(getattr(model, name))
    assert torch.equal(found, value) and not found.is_inference()
    assert found.stride() == getattr(model, name).stride()
    assert not found.numel() or found.data_ptr() != getattr(model, name).data_ptr()


def test_fetching_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(StoreError, match="was not there when the model was attached"):
        attached(Model()).fetch(nn.Parameter(torch.ones(1)))


def test_fill_and_empty_one_parameter(model: Model, table: WeightTable) -> None:
    value = model.turned.detach().clone()
    master = table.masters["turned"].data_ptr()
    table.fill(model.turned)
    assert torch.equal(model.turned, value) and model.turned.data_ptr() != master
    table.empty(model.turned)
    assert torch.equal(model.turned, value) and model.turned.data_ptr() == master
    assert table.changes() == NONE


def test_what_is_written_into_a_filled_parameter_reaches_its_master(
    model: Model, table: WeightTable
) -> None:
    table.fill(model.plain)
    with torch.no_grad():
        model.plain.fill_(3)
    table.empty(model.plain)
    assert model.plain.eq(3).all()
    assert model.plain.data_ptr() == table.masters["plain"].data_ptr()
    assert table.changes() == WeightChanges(("plain",))


def test_a_filled_parameter_that_is_set_keeps_its_new_tensor(
    model: Model, table: WeightTable
) -> None:
    table.fill(model.plain)
    model.plain.data = torch.full((3, 5), 4.0)
    table.empty(model.plain)
    assert table.changes() == WeightChanges(("plain",), moved=True)
    assert table.fetch(model.plain).eq(4).all()


def test_emptying_an_unknown_parameter_leaves_it_alone() -> None:
    other = nn.Parameter(torch.ones(2))
    attached(Model()).empty(other)
    assert other.tolist() == [1.0, 1.0]


def test_all_weights_are_loaded_and_freed_together(model: Model, table: WeightTable) -> None:
    table.load_all()
    assert list(table.on_device) == list(table.masters)
    for name, parameter in model.named_parameters():
        copy = table.on_device[name]
        assert torch.equal(copy, parameter) and copy.stride() == parameter.stride()
        assert not copy.numel() or copy.data_ptr() != parameter.data_ptr()
    with torch.no_grad():
        model.plain.fill_(9)
    table.reload(table.changes().rewritten)
    assert table.on_device["plain"].eq(9).all()
    table.unload()
    table.reload(["plain"])
    assert table.on_device == {}


def test_restore_twice_and_install_again(model: Model, table: WeightTable) -> None:
    value = model.plain.detach().clone()
    table.restore()
    table.restore()
    assert torch.equal(model.plain, value)
    table.install()
    assert model.plain.data_ptr() == table.masters["plain"].data_ptr()


def test_nothing_stays_on_the_device_when_loading_all_fails(
    model: Model, table: WeightTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table._weights[1], "shape", (1 << 40, 1))  # it has no such view
    with pytest.raises(RuntimeError, match="out of bounds"):
        table.load_all()
    masters = [table.masters[name].data_ptr() for name, _ in model.named_parameters()]
    assert table.on_device == {} and masters == [p.data_ptr() for p in model.parameters()]


def test_bytes_of_a_tensor_are_its_own_memory() -> None:
    x = torch.ones(2, 3, dtype=torch.int16)
    found = byte_view(x)
    found[:2] = 0
    assert found.shape == (12,) and x.flatten().tolist() == [0, 1, 1, 1, 1, 1]
    assert not byte_view(nn.Parameter(torch.ones(2))).requires_grad
