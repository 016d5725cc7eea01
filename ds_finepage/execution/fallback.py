"""Runs what cannot be planned: outside the arena, one op's weights at a time (floor 2).

[Note: the fallback]
Two things cannot be planned. A graph that cannot be written down as a taskgraph (a size depends on
data, a weight is changed) is run op by op with the weights of one op on the device at a time. Code
between two graphs (a graph break) runs in eager PyTorch, and a hook on each module brings in that
module's own parameters for the time of its forward. Both are counted. Activations are then
PyTorch's, so the budget cannot be promised; the arena is given back first, so that they have its
room.

A hook that Dynamo traces as part of a graph does nothing: the plan brings the weights. It must not
become a graph of its own, though, because what it belongs to may then run without one. Hence
``skip_code``: such a frame runs as it is, while tracing into it is not affected. What it calls is
kept from Dynamo altogether.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, cast

import torch
from torch._dynamo.eval_frame import skip_code
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.hooks import RemovableHandle

from ds_finepage.errors import StoreError
from ds_finepage.execution.stores import WeightTable


class _FetchingInterpreter(Interpreter):
    """Runs a torch-level graph; a weight is on the device only while an op uses it."""

    def __init__(self, module: GraphModule, weights: WeightTable) -> None:
        super().__init__(module)
        self._weights = weights
        self._fetched: list[tuple[torch.Tensor, int]] = []  # by the node that runs, and versions
        self._viewed: list[tuple[torch.Tensor, int]] = []  # those that there are views of

    def fetch_args_kwargs_from_env(self, n: Node) -> Any:
        args, kwargs = super().fetch_args_kwargs_from_env(n)
        fetched: dict[int, torch.Tensor] = {}

        def replace(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value not in self._weights:
                return value
            if id(value) not in fetched:
                fetched[id(value)] = self._weights.fetch(value)
            return fetched[id(value)]

        if n.op == "output":
            return args, kwargs
        replaced = torch.utils._pytree.tree_map(replace, (args, kwargs))
        self._fetched = [(t, t._version) for t in fetched.values()]
        return replaced

    def run_node(self, n: Node) -> Any:
        self._fetched = []
        result = super().run_node(n)
        if any(tensor._version != version for tensor, version in self._fetched + self._viewed):
            raise StoreError(
                f"{n.name} changes a weight, and host masters are read-only. Detach finepage for "
                f"a model that changes its weights in forward."
            )
        storages = [
            t.untyped_storage()._cdata
            for t in torch.utils._pytree.tree_leaves(result)
            if isinstance(t, torch.Tensor) and t.layout is torch.strided
        ]
        self._viewed += [f for f in self._fetched if f[0].untyped_storage()._cdata in storages]
        return result


def run_unplanned(module: GraphModule, args: Sequence[Any], weights: WeightTable) -> Any:
    """Run a torch-level graph without a plan; see [Note: the fallback]."""
    with torch.no_grad():
        return _FetchingInterpreter(module, weights).run(*args)


def hook_modules(
    module: torch.nn.Module, weights: WeightTable, on_use: Callable[[torch.nn.Module], None]
) -> list[RemovableHandle]:
    """Register hooks that bring in a module's own parameters when it runs outside any graph.

    Args:
        module: The root.
        weights: Where to fetch from.
        on_use: Called before every such use; it counts, and gives the arena back.
    """
    handles = []
    for owner in module.modules():
        own = [p for p in owner.parameters(recurse=False) if p in weights]
        if own:
            fill, empty = _filler(own, weights, on_use), _emptier(own, weights)
            for hook in (fill, empty):
                skip_code(hook.__code__)
            handles.append(owner.register_forward_pre_hook(fill))
            handles.append(owner.register_forward_hook(empty, always_call=True))
    return handles


def _filler(
    own: list[torch.nn.Parameter],
    weights: WeightTable,
    on_use: Callable[[torch.nn.Module], None],
) -> FunctionType:
    def bring_in(module: torch.nn.Module) -> None:
        on_use(module)
        for parameter in own:
            weights.fill(parameter)

    aside = torch._dynamo.disable(bring_in)

    def fill(module: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            aside(module)

    return cast(FunctionType, fill)


def _emptier(own: list[torch.nn.Parameter], weights: WeightTable) -> FunctionType:
    def take_away() -> None:
        for parameter in own:
            weights.empty(parameter)

    aside = torch._dynamo.disable(take_away)

    def empty(module: torch.nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            aside()

    return cast(FunctionType, empty)
