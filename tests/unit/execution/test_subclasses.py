"""Tensor subclasses are taken apart, show their parts under their own names, and come back."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from ds_finepage.errors import StoreError
from ds_finepage.execution.subclasses import TakenApart
from tests.unit.execution.packed import Opaque, Packed, packed_linear


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(packed_linear(4, 6), nn.ReLU(), packed_linear(6, 3))


X = torch.linspace(-1, 1, 8).reshape(2, 4)


def test_the_inner_tensors_are_parameters_and_the_module_computes_as_before(
    model: nn.Sequential,
) -> None:
    expected, weight = model(X), model[0].weight
    TakenApart(model)
    assert weight.numbers is model.get_parameter("0.weight_numbers")  # no bytes of its own
    assert names(model)[:3] == ["0.bias", "0.weight_numbers", "0.weight_scale_values"]
    assert isinstance(model[0], nn.Linear) and isinstance(model[0].weight, Packed)
    assert torch.equal(model(X), expected)


def test_restored_parameters_are_the_same_objects_with_plain_inner_tensors(
    model: nn.Sequential,
) -> None:
    before = model[0].weight
    expected = model(X)
    apart = TakenApart(model)
    apart.restore()
    assert type(model[0]) is nn.Linear and model[0].weight is before
    assert type(before.numbers) is torch.Tensor
    assert sorted(names(model)) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert torch.equal(model(X), expected)


def test_bytes_written_meanwhile_are_those_of_the_parameter(model: nn.Sequential) -> None:
    apart = TakenApart(model)
    with torch.no_grad():
        model.get_parameter("0.weight_numbers").fill_(7)
        model.get_parameter("2.weight_numbers").data = torch.full((3, 6), 5, dtype=torch.int8)
    apart.restore()
    assert model[0].weight.numbers.unique().tolist() == [7]
    assert model[2].weight.numbers.unique().tolist() == [5]


def test_tied_parameters_stay_tied() -> None:
    model = nn.Sequential(packed_linear(4, 4), packed_linear(4, 4))
    model[1].weight = model[0].weight
    apart = TakenApart(model)
    first, second = (part._parameters["weight_numbers"] for part in model)
    assert first is second
    apart.restore()
    assert model[0].weight is model[1].weight


def test_a_state_dict_has_the_subclass_and_loads_it(model: nn.Sequential) -> None:
    other = nn.Sequential(packed_linear(4, 6), nn.ReLU(), packed_linear(6, 3))
    with torch.no_grad():
        other[0].weight.numbers.fill_(3)
    expected = other(X)
    apart = TakenApart(model)
    state = model.state_dict()
    assert sorted(state) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert isinstance(state["0.weight"], Packed)
    assert model.load_state_dict(other.state_dict()).missing_keys == []
    assert torch.equal(model(X), expected)
    apart.restore()
    assert torch.equal(model(X), expected)


def test_a_value_of_another_form_is_not_loaded(model: nn.Sequential) -> None:
    TakenApart(model)
    state = {**model.state_dict(), "0.weight": torch.zeros(6, 4)}
    with pytest.raises(RuntimeError, match="weight_numbers"):
        model.load_state_dict(state)


def test_copies_and_pickles_are_ordinary(model: nn.Sequential) -> None:
    expected = model(X)
    TakenApart(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(other[0]) is nn.Linear and isinstance(other[0].weight, Packed)
        assert torch.equal(other(X), expected)
        with torch.no_grad():
            other[0].weight.numbers.fill_(1)
    assert torch.equal(model(X), expected)


def test_a_parameter_set_meanwhile_takes_the_place_of_the_subclass(model: nn.Sequential) -> None:
    apart = TakenApart(model)
    model[0].weight = nn.Parameter(torch.ones(6, 4))
    assert type(model[0]) is nn.Linear and "0.weight" in names(model)
    apart.take()
    apart.restore()
    assert torch.equal(model[0].weight, torch.ones(6, 4))
    assert isinstance(model[2].weight, Packed)


def test_what_comes_later_is_taken_apart_too(model: nn.Sequential) -> None:
    apart = TakenApart(model)
    model.append(packed_linear(3, 2))
    model[0].second = packed_linear(1, 1).weight
    apart.take()
    assert "3.weight_numbers" in names(model) and "0.second_numbers" in names(model)
    apart.restore()
    found = [n for n, p in model.named_parameters() if isinstance(p, Packed)]
    assert sorted(found) == ["0.second", "0.weight", "2.weight", "3.weight"]


def test_dynamo_sees_one_node_for_the_subclass(model: nn.Sequential) -> None:
    expected = model(X)
    TakenApart(model)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph

    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=backend, fullgraph=True)(X), expected)
    assert len(graphs) == 1


def test_a_subclass_without_the_protocol_is_refused_and_named(model: nn.Sequential) -> None:
    model[2]._parameters["weight"] = Opaque(torch.zeros(3, 6))
    with pytest.raises(StoreError, match="parameter weight is a Opaque.*torchao"):
        TakenApart(model)
    assert type(model[0]) is nn.Linear and isinstance(model[0].weight, Packed)


def test_an_inner_tensor_that_cannot_be_taken_apart_is_named() -> None:
    linear = packed_linear(2, 2)
    linear.weight.numbers = Opaque(torch.zeros(2, 2, dtype=torch.int8))
    with pytest.raises(StoreError, match="Packed has a Opaque in weight_numbers"):
        TakenApart(linear)
