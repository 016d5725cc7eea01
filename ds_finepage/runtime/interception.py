"""Where calls of a model are taken over, and how that is undone."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from itertools import chain
from operator import attrgetter
from threading import get_ident
from typing import Any

import torch

from ds_finepage._compat.torch import (
    OptimizedModule,
    TorchDynamoException,
    dynamo_config,
    get_eval_frame_callback,
    skip_code,
    trace_rules,
    wrap_inline,
)
from ds_finepage.execution.fallback import RunningCall, is_traced
from ds_finepage.execution.stores import WeightTable

logger = logging.getLogger(__name__)

MIN_RECOMPILES = 64
"""Dynamo's own limit of 8 graphs a function is too low where a graph break makes one a layer."""

_PARAMETERS = attrgetter("_parameters")
_CHILDREN = attrgetter("_modules")


def entries(module: torch.nn.Module, weights: WeightTable) -> list[torch.nn.Module]:
    """List the modules whose call from outside is captured: the root, and parts that hold others.

    ``generate`` calls an encoder by itself. A part with weights of its own is mostly a single op,
    for which a plan does no more than the fallback.
    """
    found = [module]
    for part in module.modules():
        own = list(part.parameters(recurse=False))
        # Dynamo's wrapper passes on what is set on it.
        if part is module or any(p in weights for p in own) or isinstance(part, OptimizedModule):
            continue
        if any(p in weights for p in part.parameters()):
            found.append(part)
    return found


def captured_call(module: torch.nn.Module, weights: WeightTable) -> Callable[..., Any]:
    """Return what Dynamo is to capture: the call of a module with its hooks.

    Dynamo does not look at ``_call_impl`` itself, but at the forward that it calls. That leaves
    out hooks, which matter where the module has weights of its own, and it leaves out everything
    where forward is one of torch's own (``Sequential``). An outer frame brings both in.
    """
    has_own = any(p in weights for p in module.parameters(recurse=False))
    if has_own or trace_rules.check(module.forward):
        return wrap_inline(module._call_impl)
    return module._call_impl


RunCall = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a call of a module: the module, its arguments and its named arguments."""


class PlannedCall:
    """Runs the calls of one module; stands as its ``_compiled_call_impl``.

    A copy of the module is an ordinary module: copying and pickling leave this object out.
    """

    def __init__(self, module: torch.nn.Module, run: RunCall, running: RunningCall) -> None:
        """Take over the calls of ``module``.

        Args:
            module: The module.
            run: Runs a call by plan.
            running: Tells which thread runs a call of the model now. In that thread a part of the
                model is called as ever: Dynamo traces the call, or it stands between two graphs.
        """
        self._module = module
        self._run = run
        self._running = running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call."""
        if (
            torch.compiler.is_dynamo_compiling()
            or self._running.thread == get_ident()
            or is_traced()
        ):
            return self._module._call_impl(*args, **kwargs)
        if get_eval_frame_callback() in (None, False):
            return self._run(self._module, args, kwargs)
        # Dynamo works on the caller; it must not work on what is in here.
        return torch.compiler.disable(self._run)(self._module, args, kwargs)

    def __deepcopy__(self, memo: Any) -> None:
        """Leave a copy of the module without this object."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave a pickle of the module without this object."""
        return types.NoneType, ()


skip_code(PlannedCall.__call__.__code__)  # between two graphs it must not become one itself


class ModuleTree:
    """The modules of a model and their parameters, as they were seen last."""

    def __init__(self, module: torch.nn.Module, weights: WeightTable) -> None:
        """See them now."""
        self._module = module
        self._weights = weights
        self.see()

    def see(self) -> None:
        """Take the tree as it is now for unchanged."""
        self._modules = list(self._module.modules())
        self._parents = [m for m in self._modules if m._modules]
        self._seen = self._look()

    def _look(self) -> tuple[list[int], list[int]]:
        parameters = chain.from_iterable(map(dict.values, map(_PARAMETERS, self._modules)))
        children = chain.from_iterable(map(dict.values, map(_CHILDREN, self._parents)))
        return list(map(id, parameters)), list(map(id, children))

    def has_new_parts(self) -> bool:
        """Tell whether the model has a module or a parameter that it did not have.

        A tensor in a parameter's place, as ``functional_call`` puts it there, is no such part.
        """
        if self._look() == self._seen:
            return False
        known = set(map(id, self._modules))
        if any(id(m) not in known for m in self._module.modules()):
            return True
        if any(p not in self._weights for p in self._module.parameters() if is_parameter(p)):
            return True
        self.see()
        return False


def is_parameter(value: Any) -> bool:
    """Tell whether a value is a parameter, not a tensor in its place."""
    return isinstance(value, torch.nn.Parameter)


def attribute_restorer(owner: Any, name: str) -> Callable[[], None]:
    """Return what gives an object's own attribute back, or its absence."""
    if name not in vars(owner):
        return lambda: vars(owner).pop(name, None)
    before = vars(owner)[name]
    return lambda: setattr(owner, name, before)


def eager_where_refused(
    compiled: Callable[..., Any], module: torch.nn.Module, num_runs: Callable[[], int]
) -> Callable[..., Any]:
    """Return a compiled call that runs eagerly what Dynamo has no graph for, instead of an error.

    A forward may do while it is traced what it never does in eager PyTorch (transformers makes
    masks then that it leaves out otherwise), and fail. The modules that run without a graph are
    counted.

    Args:
        compiled: The call.
        module: The module that it is a call of.
        num_runs: Counts the graphs that ran. Where none of a call has, the call can begin again.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        at_start = num_runs()
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            if num_runs() != at_start:
                raise
            logger.info("Dynamo has no graph for a call, which runs eagerly: %s", error)
        return torch.compiler.disable(module._call_impl)(*args, **kwargs)

    return call


def allow_recompiles() -> Callable[[], None]:
    """Raise Dynamo's recompile limit; return what restores it."""
    config = dynamo_config
    before = config.recompile_limit
    if before >= MIN_RECOMPILES:
        return lambda: None
    config.recompile_limit = MIN_RECOMPILES

    def restore() -> None:
        config.recompile_limit = before

    return restore
