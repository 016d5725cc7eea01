"""Runs code without a plan: outside the arena, with the weights of one op at a time.

[Note: the fallback]
Two kinds of code have no plan. A graph that cannot become a taskgraph (a size depends on data, a
weight changes) runs op by op, with the weights of one op on the device at a time. Code between two
graphs (a graph break) runs in eager PyTorch; a hook on each module brings in the module's own
parameters while its forward runs. Both are counted. PyTorch allocates the activations then, so the
budget is not promised. The arena is freed first, so that they can take its room.

A hook that Dynamo traces as part of a graph does nothing, because the plan brings the weights. The
hook must not become a graph of its own, since its module may then run without a graph. Therefore
``skip_code``: Dynamo runs such a frame as it is, and still traces into it. Functions that the hook
calls are hidden from Dynamo.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.utils.hooks import RemovableHandle

from ds_finepage._compat.torch import (
    FakeTensorMode,
    ProxyTorchDispatchMode,
    _get_current_dispatch_mode_stack,
    get_dynamic_layer_stack_depth,
    leaving_no_transform,
    skip_code,
    tree_leaves,
    tree_map_only,
)
from ds_finepage.errors import FinepageError, StoreError
from ds_finepage.execution.stores import WeightTable, own_weights

COMPILED_BY_CALLER = "ds_finepage runs this model by plan; torch.compile goes on behind the call"


HIDDEN = -1
"""In the place of an address, within torch.vmap: it may be that of any weight."""

_active: dict[int, bool] = {}
"""Whether a call of an attached model runs, by the number of its :class:`RunningCall`.

Dynamo guards on it; it is always true where Dynamo captures a call. All hooks of a model read it
under one name. If each hook read an attribute of one shared object, Dynamo would guard, in every
call and for every hook, on the identity of that object.
"""

_numbers = itertools.count()


class RunningCall:
    """Tells which thread runs a call of an attached model.

    The number tells attached models apart.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.thread: int | None = None
        _active[self.number] = False
        weakref.finalize(self, _active.pop, self.number)

    def begin(self) -> None:
        """Note that this thread runs a call now."""
        self.thread = get_ident()
        _active[self.number] = True

    def end(self) -> None:
        """Note that the call is over."""
        self.thread = None
        _active[self.number] = False

    def refuse(self, what: str) -> None:
        """Refuse a change while a call runs.

        Args:
            what: Name of the refused function.

        Raises:
            FinepageError: A call runs.
        """
        if _active[self.number]:
            raise FinepageError(
                f"{what}() was called while the model runs, by one of its hooks or callbacks. "
                f"Call it when the forward has returned."
            )


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

        def replace(value: torch.nn.Parameter) -> torch.Tensor:
            if value not in self._weights:
                return value
            if id(value) not in fetched:
                fetched[id(value)] = self._weights.fetch(value)
            return fetched[id(value)]

        if n.op == "output":
            return args, kwargs
        # A buffer stays itself, since the op may write it or return a view of it.
        replaced = tree_map_only(torch.nn.Parameter, replace, (args, kwargs))
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
        storages = set(map(_storage_of, tree_leaves(result)))
        self._viewed += [f for f in self._fetched if {_storage_of(f[0]), HIDDEN} & storages]
        return result


def _storage_of(value: Any) -> int | None:
    """Return the address of a tensor's storage; None for what is no tensor."""
    try:
        return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else None
    except RuntimeError:  # it wraps another tensor, as all do within torch.vmap
        return HIDDEN


def run_unplanned(module: GraphModule, args: Sequence[Any], weights: WeightTable) -> Any:
    """Run a torch-level graph without a plan; see [Note: the fallback]."""
    with torch.no_grad(), leaving_no_transform():
        return _FetchingInterpreter(module, weights).run(*args)


def run_resident(
    module: GraphModule,
    args: Sequence[Any],
    weights: Mapping[int, tuple[torch.Tensor, str]],
    on_device: Mapping[str, torch.Tensor],
) -> Any:
    """Let PyTorch run a torch-level graph, with every weight on the device.

    Args:
        module: The graph.
        args: The arguments of the call.
        weights: Call position -> (parameter, name).
        on_device: Weight name -> the tensor that takes the place of the parameter.
    """
    found = list(args)
    for position, (parameter, name) in weights.items():
        weight = on_device[name]
        if weight.requires_grad != parameter.requires_grad:
            # Products with weights that ask for gradients have other last bits.
            weight.requires_grad_(parameter.requires_grad)
        found[position] = weight
    with torch.no_grad(), leaving_no_transform():
        return module(*found)


def is_traced() -> bool:
    """Tell whether the caller traces the call: with ``torch.jit``, ``torch.export`` or ``vmap``.

    Such a call runs in PyTorch, on parameters that show the host masters.
    """
    tracers = FakeTensorMode, ProxyTorchDispatchMode
    return (
        torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        or get_dynamic_layer_stack_depth() > 0
        or any(isinstance(m, tracers) for m in _get_current_dispatch_mode_stack())
    )


def hook_modules(
    module: torch.nn.Module,
    weights: WeightTable,
    on_use: Callable[[torch.nn.Module], None],
    running: RunningCall,
) -> list[RemovableHandle]:
    """Register hooks that bring in a module's own parameters where it runs outside any graph.

    Args:
        module: The root.
        weights: Where to fetch from.
        on_use: Called before each such use; it counts, and frees the arena.
        running: Tells whether a call of the root runs.
    """
    handles = []
    for owner in module.modules():
        own = own_weights(owner, weights)
        if own:
            fill = _OwnHook(partial(_bring_in, own, weights, on_use), running.number)
            empty = _OwnHook(partial(_take_away, own, weights), None)
            handles.append(owner.register_forward_pre_hook(fill))
            handles.append(owner.register_forward_hook(empty, always_call=True))
    return handles


def _bring_in(
    own: list[torch.Tensor],
    weights: WeightTable,
    on_use: Callable[[torch.nn.Module], None],
    module: torch.nn.Module,
) -> None:
    if is_traced():
        return  # the parameters show the masters
    on_use(module)
    for parameter in own:
        weights.fill(parameter)


def _take_away(own: list[torch.Tensor], weights: WeightTable, module: torch.nn.Module) -> None:
    for parameter in own:
        weights.empty(parameter)


def ignore_call(*args: Any) -> None:
    """Do nothing: a hook of ours becomes this in a copy of its module."""


class _OwnHook:
    """A hook on a module's own parameters. A copy of the module does not get it.

    Dynamo leaves a graph at the hook of a call that does not run, if the hook has its number.
    """

    def __init__(self, action: Callable[[torch.nn.Module], None], number: int | None) -> None:
        self._hidden = torch.compiler.disable(action)
        self._number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (ignore_call,)

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._hidden(module)
        elif self._number is not None and not _active[self._number]:
            _leave_the_graph()


@torch.compiler.disable(reason=COMPILED_BY_CALLER)  # type: ignore[untyped-decorator]
def _leave_the_graph() -> None:
    pass


for _function in (_OwnHook.__call__, is_traced):
    skip_code(_function.__code__)
