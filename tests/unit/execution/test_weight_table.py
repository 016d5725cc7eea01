"""Weights that others change, and partitions of ZeRO's."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ds_finepage.errors import StoreError
from ds_finepage.execution.arena import byte_view
from ds_finepage.execution.masters import HostWeight, weights_of
from ds_finepage.execution.stores import WeightChanges, WeightTable
from ds_finepage.execution.watch import uninstall_if_unused
from tests.unit.execution.parameters import CPU, Model, attached, weights_of_module

# --- changes from outside --------------------------------------------------------------------

NONE = WeightChanges()


def test_reading_and_filling_are_no_changes(model: Model, table: WeightTable) -> None:
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
    model: Model, table: WeightTable, write: Callable[[torch.Tensor], None]
) -> None:
    expected = model.plain.detach() * 2
    write(model.plain)
    assert table.changes() == WeightChanges(("plain",))
    assert torch.equal(table.fetch(model.plain), expected)
    assert table.changes() == NONE


def test_a_tensor_made_by_data_counts_as_a_writer_as_long_as_it_lives(
    model: Model, table: WeightTable
) -> None:
    alias = model.plain.data
    part = alias[0]
    for _ in range(2):
        assert table.changes() == WeightChanges(("plain",))
    del alias
    assert table.changes() == WeightChanges(("plain",))
    del part
    assert table.changes() == WeightChanges(("plain",))
    assert table.changes() == NONE


def test_a_parameter_whose_memory_moved_counts_as_changed(model: Model, table: WeightTable) -> None:
    value = model.plain.detach().clone()
    model.plain.share_memory_()
    assert table.changes() == WeightChanges(("plain",))
    assert torch.equal(table.fetch(model.plain), value)


def test_refresh_takes_every_weight_for_changed(model: Model, table: WeightTable) -> None:
    assert table.refresh() == WeightChanges(tuple(table.masters))
    assert table.changes() == NONE


def test_a_parameter_set_to_another_tensor_has_that_as_its_master(
    model: Model, table: WeightTable
) -> None:
    value = torch.full((3, 5), 2.0)
    model.plain.data = value
    assert table.changes() == WeightChanges(("plain",), moved=True)
    assert table.masters["plain"].data_ptr() == value.data_ptr() == model.plain.data_ptr()
    value.add_(1)  # the program's own tensor is the parameter now, as without ds_finepage
    assert model.plain.eq(3).all() and table.fetch(model.plain).eq(3).all()


@pytest.mark.parametrize(
    "value", [torch.ones(5, 3), torch.ones(3, 5).half(), torch.ones(5, 3).t(), torch.ones(0)]
)
def test_a_parameter_may_get_another_shape_layout_or_dtype(
    model: Model, table: WeightTable, value: torch.Tensor
) -> None:
    model.plain.data = value
    assert table.changes() == WeightChanges(("plain",), moved=True, reshaped=True)
    found = table.fetch(model.plain)
    assert torch.equal(found, value) and found.dtype == value.dtype
    assert table.nbytes == sum(p.numel() * p.element_size() for p in model.parameters())


def test_other_parameters_of_a_changed_module_are_exchanged(
    model: Model, table: WeightTable
) -> None:
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


def test_a_parameter_of_an_attached_model_is_refused(model: Model, table: WeightTable) -> None:
    with pytest.raises(StoreError, match="parameter plain belongs to a model .* detach it first"):
        weights_of_module(model, CPU)
    table.restore()
    weights_of_module(model, CPU)


def freed_weight() -> nn.Module:
    model = Model()
    model.plain.untyped_storage().resize_(0)
    return model


def sparse_weight() -> nn.Module:
    return nn.ParameterDict({"plain": nn.Parameter(torch.eye(4).to_sparse(), requires_grad=False)})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (freed_weight, "plain has a shape and no data"),
        (lambda: nn.Sequential(nn.LazyLinear(4)), "0.weight is not initialized yet. Call the mod"),
        (sparse_weight, r"plain is sparse \(torch.sparse_coo\)"),
    ],
    ids=["freed", "lazy", "sparse"],
)
def test_a_parameter_without_dense_data_is_refused(
    make: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(StoreError, match=f"parameter {words}"):
        weights_of_module(make(), CPU)


@pytest.mark.parametrize("form", ["expanded", "windows", "strided"])
def test_a_parameter_is_restored_whose_elements_share_memory(form: str) -> None:
    model = Model()
    value = {
        "expanded": torch.randn(1, 4).expand(4, 4),
        "windows": torch.randn(7).unfold(0, 4, 1),
        "strided": torch.randn(4, 8)[:, ::2],
    }[form]
    before = value.clone()
    model.plain = nn.Parameter(value)
    table = attached(model)
    table.restore()
    assert torch.equal(model.plain, before)
    assert (model.plain.data_ptr() == value.data_ptr()) == (form == "strided")


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


@pytest.mark.parametrize("is_gathered", [False, True])
def test_a_partition_takes_the_value_of_a_parameter_that_is_set(is_gathered: bool) -> None:
    """A gathered parameter keeps its tensor."""
    parameter, partition, table, _ = partitioned(lambda: is_gathered)
    value = torch.ones(2, 3)
    parameter.data = value
    assert table.changes() == WeightChanges(("w",))
    assert partition.tolist() == [1.0] * 6
    kept = value if is_gathered else partition
    assert parameter.data_ptr() == kept.data_ptr()


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
