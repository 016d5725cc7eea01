"""Host masters: taken from a module, put away, and given back as they were.

PYTEST_DONT_REWRITE: else pytest prints parameters, and those here have no bytes to print.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_finepage.errors import StoreError
from ds_finepage.execution.executor import byte_view
from ds_finepage.execution.stores import HostWeight, WeightTable, weights_of_module

CPU = torch.device("cpu")


class Model(nn.Module):
    """Parameters of every sort."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(3, 5))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.sparse = nn.Parameter(torch.randn(4, 6)[:, ::2])
        self.short = nn.Parameter(torch.randn(7).to(torch.bfloat16))
        self.number = nn.Parameter(torch.tensor(2.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.whole = nn.Parameter(torch.arange(6), requires_grad=False)


def attached(module: nn.Module) -> WeightTable:
    table = WeightTable(weights_of_module(module, CPU), CPU)
    table.install()
    return table


every_parameter = pytest.mark.parametrize("name", [n for n, _ in Model().named_parameters()])


# --- taking over -----------------------------------------------------------------------------


@every_parameter
def test_a_master_holds_the_bytes_of_the_dense_tensor(name: str) -> None:
    model = Model()
    (weight,) = [w for w in weights_of_module(model, CPU) if w.name == name]
    before = getattr(model, name).detach()
    assert weight.master.dtype is torch.uint8 and weight.master.dim() == 1
    assert weight.master.numel() == before.numel() * before.element_size()
    rebuilt = weight.master.view(weight.dtype).as_strided(weight.shape, weight.stride)
    assert torch.equal(rebuilt, before)


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
        "parameter 0.weight is on the meta device and has no data; load the weights first"
    )


def test_the_size_of_a_table_is_that_of_its_masters() -> None:
    model = Model()
    expected = sum(p.numel() * p.element_size() for p in model.parameters())
    assert attached(model).nbytes == expected


def test_names_are_by_object() -> None:
    model = Model()
    table = attached(model)
    assert table.names[id(model.plain)] == "plain"
    assert model.plain in table
    assert nn.Parameter(torch.ones(3, 5)) not in table
    assert "plain" not in table


# --- in place of the parameter ---------------------------------------------------------------


@every_parameter
def test_an_installed_parameter_looks_the_same_and_has_no_bytes(name: str) -> None:
    model = Model()
    parameter = getattr(model, name)
    needs_grad, dtype, shape = parameter.requires_grad, parameter.dtype, parameter.shape
    attached(model)
    assert getattr(model, name) is parameter
    assert (parameter.requires_grad, parameter.dtype) == (needs_grad, dtype)
    assert parameter.shape == shape and parameter.device == CPU
    assert parameter.untyped_storage().nbytes() == 0


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
def test_restore_gives_back_the_very_memory(name: str) -> None:
    model = Model()
    parameter = getattr(model, name)
    address, stride, value = parameter.data_ptr(), parameter.stride(), parameter.detach().clone()
    attached(model).restore()
    assert getattr(model, name) is parameter
    assert (parameter.data_ptr(), parameter.stride()) == (address, stride)
    assert torch.equal(parameter, value)


def test_restore_twice_and_install_again() -> None:
    model = Model()
    value = model.plain.detach().clone()
    table = attached(model)
    table.restore()
    table.restore()
    assert torch.equal(model.plain, value)
    table.install()
    assert model.plain.untyped_storage().nbytes() == 0


# --- outside of any plan ---------------------------------------------------------------------


@every_parameter
def test_fetch_returns_a_full_copy(name: str) -> None:
    model = Model()
    value = getattr(model, name).detach().clone(memory_format=torch.contiguous_format)
    table = attached(model)
    found = table.fetch(getattr(model, name))
    assert torch.equal(found, value)
    assert found.stride() == getattr(model, name).stride()
    assert getattr(model, name).untyped_storage().nbytes() == 0


def test_what_is_fetched_is_not_the_master() -> None:
    model = Model()
    value = model.plain.detach().clone()
    table = attached(model)
    table.fetch(model.plain).zero_()
    table.restore()
    assert torch.equal(model.plain, value)


def test_fetching_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(StoreError, match="was not there when the model was attached"):
        attached(Model()).fetch(nn.Parameter(torch.ones(1)))


def test_fetching_works_in_inference_mode() -> None:
    model = Model()
    value = model.plain.detach().clone()
    table = attached(model)
    with torch.inference_mode():
        found = table.fetch(model.plain)
    assert torch.equal(found, value) and not found.is_inference()


def test_fill_and_empty_one_parameter() -> None:
    model = Model()
    value = model.turned.detach().clone()
    table = attached(model)
    table.fill(model.turned)
    assert torch.equal(model.turned, value)
    assert model.plain.untyped_storage().nbytes() == 0
    table.empty(model.turned)
    assert model.turned.untyped_storage().nbytes() == 0 and model.turned.shape == (6, 4)


def test_emptying_an_unknown_parameter_leaves_it_alone() -> None:
    other = nn.Parameter(torch.ones(2))
    attached(Model()).empty(other)
    assert other.tolist() == [1.0, 1.0]


# --- disturbances ----------------------------------------------------------------------------


def test_nothing_is_disturbed_by_itself() -> None:
    model = Model()
    table = attached(model)
    assert table.disturbed() == []
    table.fill(model.plain)
    table.empty(model.plain)
    assert table.disturbed() == []


def test_a_parameter_that_lost_its_shape_gets_it_back() -> None:
    """This is how ``GatheredParameters`` leaves one behind."""
    model = Model()
    table = attached(model)
    model.plain.data = torch.empty(0)
    model.short.data = torch.empty(0, dtype=torch.bfloat16)
    assert table.disturbed() == ["plain", "short"]
    assert model.plain.shape == (3, 5) and model.short.shape == (7,)
    assert model.plain.untyped_storage().nbytes() == 0
    assert table.disturbed() == []


def test_a_parameter_of_another_size_is_emptied() -> None:
    model = Model()
    table = attached(model)
    model.plain.data = torch.ones(100)
    assert table.disturbed() == ["plain"]
    assert model.plain.shape == (3, 5)


def test_masters_may_come_from_elsewhere() -> None:
    """DeepSpeed's partitions are masters too; what ``restore`` does is theirs to say."""
    parameter, calls = nn.Parameter(torch.empty(0)), []
    master = byte_view(torch.arange(6.0))
    weight = HostWeight(
        "w", parameter, master, (2, 3), (3, 1), torch.float32, lambda: calls.append(1)
    )
    table = WeightTable([weight], CPU)
    table.install()
    assert parameter.shape == (2, 3)
    assert torch.equal(table.fetch(parameter), torch.arange(6.0).view(2, 3))
    table.restore()
    assert calls == [1]


# --- bytes -----------------------------------------------------------------------------------


def test_bytes_of_a_tensor_are_its_own_memory() -> None:
    x = torch.ones(2, 3, dtype=torch.int16)
    found = byte_view(x)
    found[:2] = 0
    assert found.shape == (12,) and x.flatten().tolist() == [0, 1, 1, 1, 1, 1]


def test_bytes_of_a_parameter_need_no_grad() -> None:
    assert not byte_view(nn.Parameter(torch.ones(2))).requires_grad


@pytest.mark.gpu
def test_masters_for_cuda_are_pinned_and_fetched_to_the_device() -> None:
    model = nn.Linear(4, 4)
    value = model.weight.detach().clone()
    device = torch.device("cuda")
    weights = weights_of_module(model, device)
    assert all(w.master.is_pinned() for w in weights)
    table = WeightTable(weights, device)
    table.install()
    assert model.weight.is_cuda
    assert torch.equal(table.fetch(model.weight).cpu(), value)
    table.restore()
    assert not model.weight.is_cuda and torch.equal(model.weight, value)
