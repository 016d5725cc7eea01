"""Graphs of Dynamo as bytes, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from ds_finepage._compat.traces import CAN_KEEP_TRACES
from ds_finepage.capture.identities import NotKeptError

if not CAN_KEEP_TRACES:
    pytest.skip("traces are kept in other releases of torch", allow_module_level=True)

from ds_finepage.capture.dynamo_graph import DynamoGraph
from ds_finepage.capture.kept_graph import dump_graph, load_graph
from ds_finepage.capture.recording import Recording, record, record_range


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return torch.relu(self.linear(x).flatten() * x.shape[0]), x.shape[0] + 1


def traced(
    function: Callable[..., Any], *args: Any, dynamic: bool = False
) -> tuple[GraphModule, list[Any], bytes]:
    """Return the graph of a call, its arguments, and the graph as bytes."""
    found: list[Any] = []

    def backend(module: GraphModule, example: list[Any]) -> Any:
        content = dump_graph(module)

        def run(*given: Any) -> Any:
            found.extend((module, list(given), content))
            return module.forward(*given)

        return run

    torch.compiler.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*args)
    return found[0], found[1], found[2]


@pytest.mark.parametrize("dynamic", (False, True))
def test_a_graph_comes_back_with_what_a_recording_needs(dynamic: bool) -> None:
    layer = Layer()
    module, args, content = traced(layer, torch.ones(3, 4), dynamic=dynamic)
    again = load_graph(content)
    names = {id(p): n for n, p in layer.named_parameters()}
    kept, first = (DynamoGraph(m, args, names, "graph") for m in (again, module))
    assert again.code == module.code
    assert all(map(torch.equal, again(*args)[:1], module(*args)[:1]))
    assert kept.key_positions == first.key_positions
    assert kept.fixed_positions == first.fixed_positions
    assert kept.num_host_outputs == first.num_host_outputs
    assert kept.host_outputs(args) == first.host_outputs(args)
    assert record(kept, args) == record(first, args)
    assert any(task.label == "linear" for task in record(kept, args).tasks)


def test_a_graph_with_symbols_serves_a_range_of_sizes() -> None:
    module, args, content = traced(Layer(), torch.ones(3, 4), dynamic=True)
    recordings = [
        record_range(DynamoGraph(m, args, {}, "graph"), args) for m in (load_graph(content), module)
    ]
    kept, first = (found for found in recordings if isinstance(found, Recording))
    assert kept.values_of(args) == first.values_of(args) != {}
    sizes = {name: 7 for name in kept.values_of(args)}
    assert kept.admits(sizes) and kept.at(sizes) == first.at(sizes)


def test_a_graph_that_holds_a_tensor_is_not_kept() -> None:
    constant = torch.ones(4)

    def adds(x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0, 3.0, 4.0]) + constant

    module = torch.fx.symbolic_trace(adds)
    assert any(node.op == "get_attr" for node in module.graph.nodes)
    with pytest.raises(NotKeptError, match="a graph that holds .* is not kept"):
        dump_graph(module)


def test_a_graph_with_an_argument_of_another_kind_is_not_kept() -> None:
    module = torch.fx.symbolic_trace(lambda x: torch.relu(x))
    for node in module.graph.nodes:
        node.meta["example_value"] = torch.ones(4)
    with pytest.raises(NotKeptError, match="an argument of type Tensor"):
        dump_graph(module)
