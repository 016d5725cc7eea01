"""What runs without a plan: right, and with one op's weights on the device at a time."""

from __future__ import annotations

import copy
import functools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._functorch import get_dynamic_layer_stack_depth
from torch._dynamo.guards import GuardBuilder
from torch._guards import Guard, Source
from torch.fx import GraphModule, symbolic_trace

from ds_finepage.errors import StoreError
from ds_finepage.execution import fallback
from ds_finepage.execution.fallback import RunningCall, hook_modules, run_resident, run_unplanned
from ds_finepage.execution.stores import WeightTable
from tests.unit.capture.replay import by_dynamo
from tests.unit.execution.parameters import weights_of_module

CPU = torch.device("cpu")


class Two(nn.Module):
    """Two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(4, 4))
        self.b = nn.Parameter(torch.randn(4, 4))


class Recording(WeightTable):
    """A table that writes down what is fetched."""

    fetched: list[tuple[str, weakref.ref[torch.Tensor]]]
    alive_at_fetch: list[int]

    def fetch(self, parameter: torch.Tensor) -> torch.Tensor:
        self.alive_at_fetch.append(sum(ref() is not None for _, ref in self.fetched))
        found = super().fetch(parameter)
        self.fetched.append((self.names[id(parameter)], weakref.ref(found)))
        return found


def table_of(module: nn.Module) -> Recording:
    table = Recording(weights_of_module(module, CPU), CPU)
    table.fetched, table.alive_at_fetch = [], []
    table.install()
    return table


def unplanned(function: Callable[..., Any]) -> tuple[GraphModule, Two, Recording, torch.Tensor]:
    model = Two()
    x = torch.randn(4, 4)
    return symbolic_trace(function), model, table_of(model), x


def shows_masters(model: nn.Module, table: WeightTable) -> bool:
    """Tell whether every parameter is its host master, so that it takes no device bytes."""
    return all(
        p.data_ptr() == table.masters[table.names[id(p)]].data_ptr() for p in model.parameters()
    )


def values(table: WeightTable) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = (table.masters[n].view(torch.float32).view(4, 4).clone() for n in ("a", "b"))
    return a, b


# --- graphs ----------------------------------------------------------------------------------


RESULTS: dict[str, Callable[..., Any]] = {
    "products": lambda x, a, b: torch.relu(x @ a) @ b + a,
    "lists and keyword arguments": lambda x, a, b: torch.add(torch.stack([x, a]), other=b),
    "a sparse tensor": lambda x, a, b: (x @ a).to_sparse(),
    "a view of a weight": lambda x, a, b: a.t(),
    "a change of what was computed from a weight": lambda x, a, b: (a.t() + 1).add_(1) @ x,
}


@pytest.mark.parametrize("what", RESULTS)
def test_the_result_is_that_of_eager(what: str) -> None:
    module, model, table, x = unplanned(RESULTS[what])
    a, b = values(table)
    found, expected = run_unplanned(module, (x, model.a, model.b), table), RESULTS[what](x, a, b)
    assert torch.equal(found.to_dense(), expected.to_dense())
    assert shows_masters(model, table)


def test_one_ops_weights_are_there_at_a_time_and_once() -> None:
    module, model, table, x = unplanned(lambda x, a, b: x @ (a @ a) @ b)
    run_unplanned(module, (x, model.a, model.b), table)
    assert [name for name, _ in table.fetched] == ["a", "b"]
    assert table.alive_at_fetch == [0, 0]
    assert all(ref() is None for _, ref in table.fetched)


def test_other_tensors_are_handed_on_themselves() -> None:
    module, model, table, x = unplanned(lambda x, a, b: x.add_(1))
    before = x.clone()
    found = run_unplanned(module, (x, model.a, model.b), table)
    assert found is x and torch.equal(x, before + 1)
    assert table.fetched == []


VIEWS: dict[str, Callable[..., Any]] = {
    "the weight": lambda x, a, b: (a.add_(1), x @ a)[1],
    "a view": lambda x, a, b: (a.t().add_(1), x @ a)[1],
    "a view of a view": lambda x, a, b: (a.view(-1)[2:].zero_(), x @ a)[1],
    "one of several views": lambda x, a, b: (torch.chunk(a, 2)[1].mul_(2), x @ a)[1],
    "a view that came earlier": lambda x, a, b: (a.detach(), x @ b, a[0].fill_(3))[1],
}


@pytest.mark.parametrize("what", VIEWS)
def test_a_change_through_a_view_of_a_weight_is_refused(what: str) -> None:
    module, model, table, x = unplanned(VIEWS[what])
    a, _ = values(table)
    with pytest.raises(StoreError, match="changes a weight"):
        run_unplanned(module, (x, model.a, model.b), table)
    assert torch.equal(values(table)[0], a)


def mapped(function: Callable[..., Any]) -> tuple[GraphModule, tuple[Any, ...], Recording]:
    """Let Dynamo trace a function of two weights, because ``vmap`` is no function of a graph."""
    model = Two()
    ((graph, args),) = by_dynamo(function, (model.a, model.b))
    return graph.module, args, table_of(model)


def test_tensors_within_vmap_pass() -> None:
    module, args, table = mapped(lambda a, b: torch.vmap(lambda row: (row @ b).relu())(a))
    a, b = values(table)
    (found,) = run_unplanned(module, args, table)
    assert torch.equal(found, torch.vmap(lambda row: (row @ b).relu())(a))


def test_a_change_within_vmap_is_refused() -> None:
    module, args, table = mapped(lambda a, b: torch.vmap(lambda row: row.zero_() + 1)(a))
    a, _ = values(table)
    with pytest.raises(StoreError, match="changes a weight"):
        run_unplanned(module, args, table)
    assert get_dynamic_layer_stack_depth() == 0
    assert torch.equal(values(table)[0], a)


def test_a_graph_that_fails_on_the_device_ends_its_transforms() -> None:
    module, args, table = mapped(lambda a, b: torch.vmap(lambda row: row @ b)(a))
    weights = {0: (args[0], "a")}
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run_resident(module, args, weights, {"a": torch.ones(3, 3)})
    assert get_dynamic_layer_stack_depth() == 0


def test_no_autograd_graph_is_built() -> None:
    module, model, table, x = unplanned(lambda x, a, b: x @ a)
    with torch.enable_grad():
        found = run_unplanned(module, (x, model.a, model.b), table)
    assert not found.requires_grad


# --- modules between graphs ------------------------------------------------------------------


class Nested(nn.Module):
    """A module whose forward reads its own parameter and calls another."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.inner = nn.Linear(3, 3)
        self.activation = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.inner(x * self.scale)) * self.scale


def hooked(
    running: RunningCall | None = None,
) -> tuple[Nested, WeightTable, list[nn.Module], list[Any], Nested]:
    model = Nested()
    plain = Nested()
    plain.load_state_dict(model.state_dict())
    table = WeightTable(weights_of_module(model, CPU), CPU)
    table.install()
    used: list[nn.Module] = []
    hooks = hook_modules(model, table, used.append, running or RunningCall())
    return model, table, used, hooks, plain


def test_a_module_outside_any_graph_gets_its_own_parameters_and_each_use_is_counted() -> None:
    model, table, used, handles, plain = hooked()
    x = torch.randn(2, 3)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        assert shows_masters(model, table)
    assert used == [model, model.inner] * 2
    assert len(handles) == 4  # before and after, for two of three modules: one has no parameters


def test_use_is_counted_before_the_parameters_come() -> None:
    """The arena is given back first, so that they have its room."""
    model = nn.Linear(3, 3)
    table = WeightTable(weights_of_module(model, CPU), CPU)
    table.install()
    found: list[bool] = []
    hook_modules(model, table, lambda m: found.append(shows_masters(m, table)), RunningCall())
    model(torch.randn(2, 3))
    assert found == [True]


def test_an_error_in_forward_leaves_parameters_that_show_their_masters() -> None:
    model, table, _, _, _ = hooked()
    with pytest.raises(RuntimeError, match="shapes|size"):
        model(torch.randn(2, 5))
    assert shows_masters(model, table)


def test_dynamo_guards_once_on_whether_a_call_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guard for each hook, on all reading one object, would cost a microsecond a module."""
    found: list[str] = []
    before = GuardBuilder.DUPLICATE_INPUT

    @functools.wraps(before)
    def note(builder: GuardBuilder, guard: Guard, source_b: Source) -> None:
        found.append(f"{guard.name} is {source_b.name}")
        before(builder, guard, source_b)

    monkeypatch.setattr(GuardBuilder, "DUPLICATE_INPUT", note)
    running = RunningCall()
    model, _, used, _, plain = hooked(running)
    running.begin()
    x = torch.randn(2, 3)
    with torch.no_grad():
        result = torch.compile(lambda given: model(given), backend="eager")(x)
    running.end()
    assert torch.equal(result, plain(x))
    assert used == []  # both modules were captured
    assert [name for name in found if "hooks" in name] == []


def test_a_running_call_that_is_gone_leaves_nothing() -> None:
    before = dict(fallback._active)
    running = RunningCall()
    running.begin()
    assert fallback._active == {**before, running.number: True}
    del running
    assert fallback._active == before


def test_parameters_that_are_not_in_the_table_are_left_alone() -> None:
    model = nn.Linear(3, 3)
    table = WeightTable([], CPU)
    assert hook_modules(model, table, lambda m: None, RunningCall()) == []


def test_a_copy_of_a_hooked_module_is_an_ordinary_module() -> None:
    model, _, used, _, plain = hooked()
    x = torch.randn(2, 3)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), plain(x))
    assert used == []


def test_weights_on_the_device_take_the_place_of_parameters() -> None:
    def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight

    parameter, on_device = nn.Parameter(torch.zeros(4, 4)), torch.randn(4, 4)
    x = torch.randn(4, 4)
    weights = {1: (parameter, "w")}
    found = run_resident(symbolic_trace(product), (x, parameter), weights, {"w": on_device})
    assert torch.equal(found, x @ on_device)
    assert on_device.requires_grad and not found.requires_grad


def test_in_a_graph_the_hooks_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    running = RunningCall()
    running.begin()
    model, table, used, _, _ = hooked(running)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    table.fill(model.scale)
    for hook in [*model._forward_pre_hooks.values()]:
        hook(model, ())
    for hook in [*model._forward_hooks.values()]:
        hook(model, (), None)
    assert used == []
    assert not shows_masters(model, table)
