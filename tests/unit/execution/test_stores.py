"""Host masters: taken from a module, shown by its parameters, and given back."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ds_finepage.errors import StoreError
from ds_finepage.execution.executor import byte_view
from ds_finepage.execution.masters import HostWeight, weights_of, weights_of_module
from ds_finepage.execution.stores import WeightChanges, WeightTable
from ds_finepage.execution.watch import uninstall_if_unused

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
    assert model.plain.data_ptr() == table.masters["plain"].data_ptr()


@every_parameter
def test_restore_gives_back_what_was_written_meanwhile(name: str) -> None:
    model = Model()
    parameter = getattr(model, name)
    address = parameter.data_ptr()
    table = attached(model)
    with torch.no_grad():
        parameter.fill_(7)
    table.restore()
    assert parameter.data_ptr() == address
    assert torch.equal(parameter, torch.full_like(parameter, 7))


def test_restore_gives_back_the_new_tensor_of_a_parameter() -> None:
    model = Model()
    table = attached(model)
    model.plain.data = torch.ones(2, 2, dtype=torch.float16)
    table.restore()
    assert torch.equal(model.plain, torch.ones(2, 2, dtype=torch.float16))


# --- outside of any plan ---------------------------------------------------------------------


@every_parameter
def test_fetch_returns_a_full_copy(name: str) -> None:
    model = Model()
    value = getattr(model, name).detach().clone(memory_format=torch.contiguous_format)
    table = attached(model)
    found = table.fetch(getattr(model, name))
    assert torch.equal(found, value)
    assert found.stride() == getattr(model, name).stride()
    assert not found.numel() or found.data_ptr() != getattr(model, name).data_ptr()


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
    master = table.masters["turned"].data_ptr()
    table.fill(model.turned)
    assert torch.equal(model.turned, value) and model.turned.data_ptr() != master
    table.empty(model.turned)
    assert torch.equal(model.turned, value) and model.turned.data_ptr() == master
    assert table.changes() == NONE


def test_what_is_written_into_a_filled_parameter_reaches_its_master() -> None:
    model = Model()
    table = attached(model)
    table.fill(model.plain)
    with torch.no_grad():
        model.plain.fill_(3)
    table.empty(model.plain)
    assert model.plain.eq(3).all()
    assert model.plain.data_ptr() == table.masters["plain"].data_ptr()
    assert table.changes() == WeightChanges(("plain",))


def test_a_filled_parameter_that_is_set_keeps_its_new_tensor() -> None:
    model = Model()
    table = attached(model)
    table.fill(model.plain)
    model.plain.data = torch.full((3, 5), 4.0)
    table.empty(model.plain)
    assert table.changes() == WeightChanges(("plain",), moved=True)
    assert table.fetch(model.plain).eq(4).all()


def test_emptying_an_unknown_parameter_leaves_it_alone() -> None:
    other = nn.Parameter(torch.ones(2))
    attached(Model()).empty(other)
    assert other.tolist() == [1.0, 1.0]


def test_all_weights_are_loaded_and_freed_together() -> None:
    model = Model()
    table = attached(model)
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


# --- changes from outside --------------------------------------------------------------------

NONE = WeightChanges()


def test_reading_and_filling_are_no_changes() -> None:
    model = Model()
    table = attached(model)
    assert table.changes() == NONE
    repr(model.plain), model.plain.sum(), model.plain.clone(), model.state_dict()
    table.fill(model.plain)
    table.empty(model.plain)
    assert table.changes() == NONE


def write_by_data(parameter: torch.Tensor) -> None:
    parameter.data.mul_(2)


def write_by_state(parameter: torch.Tensor) -> None:
    parameter.detach().mul_(2)


def write_by_view(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.view(-1)[:] *= 2


def add_to_data(parameter: torch.Tensor) -> None:
    parameter.data += parameter.data


def write_in_inference_mode(parameter: torch.Tensor) -> None:
    with torch.inference_mode():
        parameter.mul_(2)


@pytest.mark.parametrize(
    "write",
    [write_by_data, write_by_state, write_by_view, add_to_data, write_in_inference_mode],
)
def test_a_write_is_noticed_once_and_is_in_the_master(
    write: Callable[[torch.Tensor], None],
) -> None:
    model = Model()
    expected = model.plain.detach() * 2
    table = attached(model)
    write(model.plain)
    assert table.changes() == WeightChanges(("plain",))
    assert torch.equal(table.fetch(model.plain), expected)
    assert table.changes() == NONE


def test_a_tensor_made_by_data_counts_as_a_writer_as_long_as_it_lives() -> None:
    model = Model()
    table = attached(model)
    alias = model.plain.data
    part = alias[0]
    for _ in range(2):
        assert table.changes() == WeightChanges(("plain",))
    del alias
    assert table.changes() == WeightChanges(("plain",))
    del part
    assert table.changes() == WeightChanges(("plain",))
    assert table.changes() == NONE


def test_a_parameter_whose_memory_moved_counts_as_changed() -> None:
    model = Model()
    table = attached(model)
    value = model.plain.detach().clone()
    model.plain.share_memory_()
    assert table.changes() == WeightChanges(("plain",))
    assert torch.equal(table.fetch(model.plain), value)


def test_refresh_takes_every_weight_for_changed() -> None:
    model = Model()
    table = attached(model)
    assert table.refresh() == WeightChanges(tuple(table.masters))
    assert table.changes() == NONE


def test_a_parameter_set_to_another_tensor_has_that_as_its_master() -> None:
    model = Model()
    table = attached(model)
    value = torch.full((3, 5), 2.0)
    model.plain.data = value
    assert table.changes() == WeightChanges(("plain",), moved=True)
    assert table.masters["plain"].data_ptr() == value.data_ptr() == model.plain.data_ptr()
    value.add_(1)  # the program's own tensor is the parameter now, as without ds_finepage
    assert model.plain.eq(3).all() and table.fetch(model.plain).eq(3).all()


@pytest.mark.parametrize(
    "value", [torch.ones(5, 3), torch.ones(3, 5).half(), torch.ones(5, 3).t(), torch.ones(0)]
)
def test_a_parameter_may_get_another_shape_layout_or_dtype(value: torch.Tensor) -> None:
    model = Model()
    table = attached(model)
    model.plain.data = value
    assert table.changes() == WeightChanges(("plain",), moved=True, reshaped=True)
    found = table.fetch(model.plain)
    assert torch.equal(found, value) and found.dtype == value.dtype
    assert table.nbytes == sum(p.numel() * p.element_size() for p in model.parameters())


def test_a_resized_parameter_is_taken_over() -> None:
    model = Model()
    table = attached(model)
    with torch.no_grad():
        model.plain.set_(torch.ones(7))
    assert table.changes() == WeightChanges(("plain",), moved=True, reshaped=True)
    assert table.fetch(model.plain).tolist() == [1.0] * 7


def test_other_parameters_of_a_changed_module_are_exchanged() -> None:
    model = Model()
    table = attached(model)
    old = model.plain
    with torch.no_grad():
        model.short.fill_(5)
    model.plain = nn.Parameter(torch.full((2, 2), 6.0))
    model.extra = nn.Linear(2, 2)
    table.exchange(dict(model.named_parameters()), weights_of)
    assert list(table.masters) == [n for n, _ in model.named_parameters()]
    assert model.plain in table and old not in table
    assert table.fetch(model.plain).eq(6).all() and table.fetch(model.short).eq(5).all()
    assert table.changes() == WeightChanges(("short",))
    old.data.fill_(1)  # it is nobody's now
    assert table.changes() == NONE


def test_a_parameter_of_an_attached_model_is_refused() -> None:
    model = Model()
    table = attached(model)
    with pytest.raises(StoreError, match="parameter plain belongs to a model .* detach it first"):
        weights_of_module(model, CPU)
    table.restore()
    weights_of_module(model, CPU)


def test_a_parameter_whose_storage_was_freed_is_refused() -> None:
    model = Model()
    model.plain.untyped_storage().resize_(0)
    with pytest.raises(StoreError, match="parameter plain has a shape and no data"):
        weights_of_module(model, CPU)


def test_data_is_watched_only_while_a_table_is_installed() -> None:
    own = torch._C.TensorBase.data
    gc.collect()  # tables of other tests
    uninstall_if_unused()
    assert nn.Parameter.data is own
    first, second = Model(), Model()
    tables = [attached(first), attached(second)]
    assert nn.Parameter.data is not own
    tables[0].restore()
    assert nn.Parameter.data is not own
    tables[1].restore()
    assert nn.Parameter.data is own


# --- ZeRO's partitions -----------------------------------------------------------------------


def partitioned(
    is_gathered: Callable[[], bool],
) -> tuple[nn.Parameter, torch.Tensor, WeightTable, list[HostWeight]]:
    parameter, restored = nn.Parameter(torch.empty(0)), []
    partition = torch.arange(6.0)
    weight = HostWeight(
        "w",
        parameter,
        byte_view(partition),
        (2, 3),
        (3, 1),
        torch.float32,
        restored.append,
        gathered=is_gathered,
    )
    table = WeightTable([weight], CPU)
    table.install()
    return parameter, partition, table, restored


def test_masters_may_come_from_elsewhere() -> None:
    """DeepSpeed's partitions are masters too; what ``restore`` does is theirs to say."""
    parameter, partition, table, restored = partitioned(lambda: False)
    assert torch.equal(parameter, partition.view(2, 3))
    assert torch.equal(table.fetch(parameter), torch.arange(6.0).view(2, 3))
    table.restore()
    assert [w.name for w in restored] == ["w"]


def test_a_parameter_that_zero_frees_shows_its_partition_at_once() -> None:
    """``GatheredParameters`` leaves an empty tensor behind."""
    parameter, partition, table, _ = partitioned(lambda: False)
    parameter.data = torch.empty(0)
    assert torch.equal(parameter, partition.view(2, 3))
    partition.add_(1)  # ZeRO writes the partition itself
    assert table.changes() == WeightChanges(("w",))
    assert torch.equal(table.fetch(parameter), torch.arange(1.0, 7.0).view(2, 3))


def test_a_partition_takes_the_value_of_a_parameter_that_is_set() -> None:
    parameter, partition, table, _ = partitioned(lambda: False)
    parameter.data = torch.ones(2, 3)
    assert table.changes() == WeightChanges(("w",))
    assert partition.tolist() == [1.0] * 6
    assert parameter.data_ptr() == partition.data_ptr()


def test_two_partitions_can_be_swapped() -> None:
    first, one, _, _ = partitioned(lambda: False)
    second, two = nn.Parameter(torch.empty(0)), torch.full((6,), 9.0)
    weights = [
        HostWeight(n, p, byte_view(t), (2, 3), (3, 1), torch.float32, print, gathered=bool)
        for n, p, t in (("a", first, one), ("b", second, two))
    ]
    table = WeightTable(weights, CPU)
    table.install()
    first.data, second.data = second.data, first.data
    assert table.changes() == WeightChanges(("a", "b"))
    assert one.tolist() == [9.0] * 6 and two.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_gathered_parameter_keeps_its_tensor_and_its_partition_has_the_value() -> None:
    parameter, partition, table, _ = partitioned(lambda: True)
    gathered = torch.ones(2, 3)
    parameter.data = gathered
    assert table.changes() == WeightChanges(("w",))
    assert partition.tolist() == [1.0] * 6
    assert parameter.data_ptr() == gathered.data_ptr()


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
