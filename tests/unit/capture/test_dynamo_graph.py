"""Dynamo's graphs: weights, keys, numbers, labels, and what is refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule

from ds_finepage.capture.dynamo_graph import DynamoGraph
from ds_finepage.capture.finishing import versions
from ds_finepage.capture.recording import record
from ds_finepage.errors import CaptureError
from ds_finepage.graph.taskgraph import BufferKind, GraphOutput, TaskGraph
from tests.unit.capture.replay import by_dynamo, captured, replay, traced


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def key_of(graph: DynamoGraph, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(args[i] for i in graph.key_positions)


def labels(graph: TaskGraph) -> list[str]:
    return [t.label for t in graph.tasks]


class Mlp(nn.Module):
    """Two products; the outer one belongs to the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x * self.scale + self.table


# --- parameters, buffers, inputs -------------------------------------------------------------


def test_parameters_are_weights_by_their_names() -> None:
    model, x = Mlp(), rows(2, 4)
    ((graph, args),) = by_dynamo(model, (x,))
    found = record(graph, args)
    assert record(graph, args) == found
    assert torch.equal(replay(found, args)[0], model(x))
    names = {b.name for b in found.buffers if b.kind is BufferKind.WEIGHT}
    assert names == {name for name, _ in model.named_parameters()}
    assert found.weight_bytes == sum(p.numel() * 4 for p in model.parameters())
    assert {name for _, name in graph.weights.values()} == names
    parameters = dict(model.named_parameters())
    assert all(parameters[name] is p for p, name in graph.weights.values())
    assert [b.kind for b in found.buffers].count(BufferKind.INPUT) == 2  # x, and a buffer


def test_tied_weights_are_one_buffer() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
    model[2].weight = model[0].weight
    ((graph, args),) = by_dynamo(model, (rows(2, 4),))
    found = record(graph, args)
    assert found.weight_bytes == 64
    (weight,) = [b.id for b in found.buffers if b.kind is BufferKind.WEIGHT]
    assert sum(weight in t.reads for t in found.tasks) == 2


def test_weights_without_bytes_are_enough_to_capture() -> None:
    model, x = Mlp(), rows(2, 4)
    ((graph, args),) = by_dynamo(model, (x,))
    expected = record(graph, args)
    for parameter in model.parameters():
        hollow = torch.empty_strided(parameter.shape, parameter.stride())
        hollow.untyped_storage().resize_(0)
        parameter.data = hollow
    assert record(graph, args) == expected


def test_state_that_is_changed_is_told_from_inputs() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(4, 2))

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            self.cache.index_copy_(0, at, x)
            return self.cache.sum(0)

    ((graph, args),) = by_dynamo(Cached(), (rows(1, 2), torch.tensor([1])))
    kinds = [b.kind for b in record(graph, args).buffers]
    assert kinds.count(BufferKind.STATE) == 1 and kinds.count(BufferKind.INPUT) == 2


def test_an_input_is_as_large_as_its_storage() -> None:
    """It is on the device as a whole, whatever part of it the call uses."""
    whole = torch.zeros(100)
    graph = captured(lambda x: x.neg(), whole[:4])
    assert graph.buffers[0].nbytes == 400


def test_the_taskgraph_says_which_versions_it_depends_on() -> None:
    graph = captured(lambda x: x.neg(), rows(2))
    assert graph.versions == versions()
    build = torch.__version__
    assert dict(versions())["torch"] in (build, build.partition("+")[0])  # a wheel may leave it out


# --- labels ----------------------------------------------------------------------------------


def passed_on(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Pass the module on as ``args[0]``, as decorators of transformers do."""

    @wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapped


class DecoratedMlp(Mlp):
    """The same under a decorator."""

    forward = passed_on(Mlp.forward)


@pytest.mark.parametrize("make", [Mlp, DecoratedMlp])
def test_labels_are_names_of_modules(make: Callable[[], nn.Module]) -> None:
    ((graph, args),) = by_dynamo(make(), (rows(2, 4),))
    found = record(graph, args)
    by_op = dict(zip([t.op for t in found.tasks], labels(found), strict=True))
    assert by_op["aten.mul.Tensor"] == ""
    products = [t.label for t in found.tasks if "mm" in t.op]
    assert products == ["layers.0", "layers.1"]


def test_labels_of_nested_modules_are_qualified() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleDict({"up": nn.Sequential(nn.Linear(4, 4))})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks["up"](x)

    ((graph, args),) = by_dynamo(Nested(), (rows(2, 4),))
    assert set(labels(record(graph, args))) == {"blocks.up.0"}


def test_a_function_has_no_labels() -> None:
    ((graph, args),) = by_dynamo(lambda x: x.exp(), (rows(2),))
    assert labels(record(graph, args)) == [""]


# --- keys ------------------------------------------------------------------------------------


def test_sizes_that_tensors_have_are_the_key() -> None:
    runs = by_dynamo(lambda x: x * 2, (rows(3, 4),), (rows(5, 4),), dynamic=True)
    (first, args), (second, others) = runs
    assert first is second
    assert key_of(first, args) != key_of(first, others)
    assert 3 in key_of(first, args) and 5 in key_of(first, others)
    assert [record(graph, given).buffers[-1].nbytes for graph, given in runs] == [48, 80]
    ((fixed, args),) = by_dynamo(lambda x: x * 2, (rows(3, 4),))
    assert key_of(fixed, args) == ()


def test_a_number_that_only_counts_is_left_out_of_the_key() -> None:
    def step(x: torch.Tensor, n: int) -> tuple[torch.Tensor, int]:
        return x * 2, n + 1

    runs = by_dynamo(step, (rows(3), 7), (rows(3), 8), (rows(3), 9), dynamic=True)
    (graph, args), (_, others), _ = runs
    assert all(other is graph for other, _ in runs)
    assert key_of(graph, args) == key_of(graph, others) == (3,)  # the size of x
    assert record(graph, args) == record(graph, others)


def test_a_number_that_a_tensor_is_made_of_is_in_the_key() -> None:
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        return x + (n * 2 + 1)

    runs = by_dynamo(step, (rows(3), 7), (rows(3), 8), dynamic=True)
    keys = [key_of(graph, args) for graph, args in runs]
    assert keys[0] != keys[1]


def numbers() -> GraphModule:
    """Build a graph by hand: a tensor, and three numbers of which one decides a size."""
    graph = Graph()
    x, free, used, size = (graph.placeholder(n) for n in ("x", "free", "used", "size"))
    for node, value in ((free, 1), (used, 2), (size, 3)):
        node.meta["example_value"] = value
    more = graph.call_function(operator.add, (free, 1))
    more.meta["example_value"] = 2
    twice = graph.call_function(operator.mul, (used, 2))
    twice.meta["example_value"] = 4
    made = graph.call_function(torch.add, (x, twice))
    long = graph.call_function(torch.full, ((size,), 0.5))
    graph.output((made, more, long, 99, None))
    return GraphModule(nn.Module(), graph)


def test_numbers_are_followed_through_other_numbers() -> None:
    args = (rows(3), 10, 20, 5)
    graph = DynamoGraph(numbers(), args, {}, "sketch")
    assert graph.key_positions == graph.fixed_positions == (2, 3)
    assert key_of(graph, args) == (20, 5)


# --- numbers that are returned ---------------------------------------------------------------


def test_returned_numbers_are_computed_on_the_host() -> None:
    args = (rows(3), 10, 20, 5)
    graph = DynamoGraph(numbers(), args, {}, "sketch")
    assert graph.host_outputs(args) == (11, 99)
    assert graph.host_outputs((None, 30, None, None)) == (31, 99)
    assert traced(lambda x: x.neg(), rows(2)).host_outputs((rows(2),)) == ()


def test_returned_numbers_have_their_place_among_the_outputs() -> None:
    args = (rows(3), 10, 20, 5)
    found = record(DynamoGraph(numbers(), args, {}, "sketch"), args)
    made, more, long, constant, nothing = found.outputs
    assert (more, constant, nothing) == (GraphOutput(host=0), GraphOutput(host=1), GraphOutput())
    assert made.tensor is not None and long.tensor is not None
    assert found.tensors[long.tensor].shape == (5,)


def test_numbers_are_computed_anew_for_each_call() -> None:
    def step(x: torch.Tensor, n: int) -> tuple[torch.Tensor, int]:
        return x * n, n + 1  # a number that no tensor needs may stay outside the graph

    runs = by_dynamo(step, (rows(3), 7), (rows(3), 8), (rows(3), 9), dynamic=True)
    graph = runs[-1][0]
    assert [graph.host_outputs(args) for _, args in runs] == [(8,), (9,), (10,)]


# --- what is returned ------------------------------------------------------------------------


def test_an_argument_that_is_returned_is_the_argument() -> None:
    x = rows(2)
    graph = captured(lambda x: (x, x.neg()), x)
    assert graph.outputs[0] == GraphOutput(position=0)


def test_a_tensor_that_is_returned_twice_is_made_once() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x.neg()
        return y, y

    graph = captured(function, rows(2))
    assert graph.outputs[0] == graph.outputs[1] and len(graph.tasks) == 1


def test_a_view_of_an_argument_may_be_returned() -> None:
    x = rows(2, 3)
    graph = captured(lambda x: x.t(), x)
    (found,) = replay(graph, (x,))
    assert found.data_ptr() == x.data_ptr() and graph.buffers[0].kind is BufferKind.INPUT


def test_a_constant_may_be_returned() -> None:
    root = nn.Module()
    root.constant = torch.tensor([1.0, 2.0])
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.get_attr("constant"), x))
    args = (rows(2),)
    found = record(DynamoGraph(GraphModule(root, graph), args, {}, "sketch"), args)
    assert replay(found, args)[0].tolist() == [1.0, 2.0]


# --- what is refused -------------------------------------------------------------------------


def test_a_view_of_a_weight_that_is_returned_is_refused_by_name() -> None:
    with pytest.raises(CaptureError) as caught:
        captured(lambda x, w: (x @ w, w.t()), rows(2, 3), rows(3, 3), weights={1: "proj.weight"})
    assert str(caught.value) == "sketch returns a view of weight proj.weight"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (lambda x: x.nonzero(), [rows(4)], "^sketch: .*(DynamicOutputShape|DataDependent)"),
        # Traced by symbols, so nothing says that it is a number.
        (
            lambda x: (x.neg(), x.size(0)),
            [rows(3)],
            "^sketch returns a number that depends on tensor data",
        ),
        (lambda x: torch.fft.ifft(x), [rows(8)], "conjugated or negated only when it is read"),
        (
            lambda x: torch.fft.ifft(x).imag.exp(),
            [rows(8)],
            "conjugated or negated only when it is read",
        ),
        (
            lambda x: torch.linalg.svdvals(x),
            [rows(4, 4)],
            "makes vectors, which eager PyTorch would not",
        ),
        (
            lambda x, y: y @ x,
            [rows(3, 3), torch.eye(3)],
            "^sketch: argument 1 is torch.sparse_csr$",
        ),
        (lambda x, y: x @ y, [rows(2, 3), rows(4, 5)], "^sketch: RuntimeError: .*reduction dim"),
    ],
)
def test_what_no_plan_can_do_is_refused(
    function: Any, args: list[torch.Tensor], message: str
) -> None:
    if "sparse" in message:
        args = [args[0], args[1].to_sparse_csr()]
    with pytest.raises(CaptureError, match=message) as caught:
        captured(function, *args)
    assert caught.value.__cause__ is not None or "RuntimeError" not in message


def test_a_branch_on_data_is_refused() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(bool, (x,)),))
    args = (torch.ones(1),)
    with pytest.raises(CaptureError, match="^sketch: DataDependentOutput"):
        record(DynamoGraph(GraphModule(nn.Module(), graph), args, {}, "sketch"), args)


def test_vectors_that_somebody_reads_are_captured() -> None:
    assert len(captured(lambda x: torch.linalg.eigh(x)[1].exp(), rows(4, 4)).tasks) == 2
    assert len(captured(lambda x: torch.linalg.svd(x)[0] + 1, rows(4, 4)).tasks) == 2


def test_a_refused_capture_leaves_no_mode_behind() -> None:
    with pytest.raises(CaptureError):
        captured(lambda x: x.nonzero(), rows(3))
    assert torch.ones(2).add(1).tolist() == [2.0, 2.0]
    with torch.enable_grad():
        assert torch.ones(1, requires_grad=True).add(1).requires_grad


# --- the same again --------------------------------------------------------------------------


def test_capturing_changes_nothing_of_the_callers() -> None:
    x = rows(4)
    before = x.clone()
    graph = traced(lambda x: x.add_(1), x)
    record(graph, (x,))
    assert torch.equal(x, before)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_every_mode_captures_the_same(mode: Any) -> None:
    x = rows(2, 4)
    expected = captured(lambda x: torch.relu(x @ x.t()), x)
    with mode():
        assert captured(lambda x: torch.relu(x @ x.t()), x) == expected
