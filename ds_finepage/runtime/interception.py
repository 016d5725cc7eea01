"""Takes over the calls of a module, and undoes that."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from contextlib import ExitStack
from itertools import chain
from operator import attrgetter
from threading import get_ident
from typing import Any

import torch

from ds_finepage._compat.torch import (
    OptimizedModule,
    TorchDynamoException,
    get_eval_frame_callback,
    skip_code,
    trace_rules,
    wrap_inline,
)
from ds_finepage.execution.fallback import RunningCall, is_traced
from ds_finepage.execution.stores import WeightTable, own_weights

logger = logging.getLogger(__name__)

_PARAMETERS = attrgetter("_parameters")
_CHILDREN = attrgetter("_modules")


def entries(module: torch.nn.Module, weights: WeightTable) -> list[torch.nn.Module]:
    """List the modules whose outside calls are captured: the root, and parts with sub-modules.

    ``generate`` calls an encoder by itself, for example. A part with own weights is mostly a single
    op, and a plan does no more for it than the fallback.
    """
    found = [module]
    for part in module.modules():
        # Dynamo's wrapper forwards attributes that are set on it.
        if part is module or own_weights(part, weights) or isinstance(part, OptimizedModule):
            continue
        if any(own_weights(inner, weights) for inner in part.modules()):
            found.append(part)
    return found


def captured_call(module: torch.nn.Module, weights: WeightTable) -> Callable[..., Any]:
    """Return the function that Dynamo captures: the call of a module with its hooks.

    Dynamo skips ``_call_impl`` and captures the forward that it calls. That leaves out hooks, which
    matter where the module has own weights. It leaves out everything where forward belongs to torch
    itself (``Sequential``). An outer frame brings both in.
    """
    if own_weights(module, weights) or trace_rules.check(module.forward):
        return wrap_inline(module._call_impl)
    return module._call_impl


RunCall = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a call of a module: the module, its arguments and its named arguments."""


class PlannedCall:
    """Runs the calls of one module, as its ``_compiled_call_impl``.

    A copy of the module is an ordinary module: copying and pickling leave this object out. The
    model keeps its handle by this.
    """

    def __init__(
        self, module: torch.nn.Module, run: RunCall, running: RunningCall, handle: object
    ) -> None:
        """Take over the calls of ``module``.

        In the thread that is ``running`` a call of the model now, PyTorch calls the parts itself:
        Dynamo traces the call, or the call is between two graphs.
        """
        self.handle = handle
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

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave this object out of a copy or a pickle of the module."""
        return types.NoneType, ()


skip_code(PlannedCall.__call__.__code__)  # between two graphs it must not become one itself


class ModuleTree:
    """The modules of a model and their parameters, as of the last look."""

    def __init__(self, module: torch.nn.Module, weights: WeightTable) -> None:
        self._module = module
        self._weights = weights
        self.see()

    def see(self) -> None:
        """Treat the present tree as unchanged."""
        self._modules = list(self._module.modules())
        # A TorchScript module has no dictionaries, and no weight: attach() refuses one that does.
        self._plain = [m for m in self._modules if isinstance(m._parameters, dict)]
        self._parents = [m for m in self._plain if m._modules]
        self._seen = self._look()

    def _look(self) -> tuple[list[int], list[int]]:
        parameters = chain.from_iterable(map(dict.values, map(_PARAMETERS, self._plain)))
        children = chain.from_iterable(map(dict.values, map(_CHILDREN, self._parents)))
        return list(map(id, parameters)), list(map(id, children))

    def has_new_parts(self) -> bool:
        """Tell whether the model has a new module or a new parameter.

        A tensor in the place of a parameter, as ``functional_call`` puts it, does not count.
        """
        if self._look() == self._seen:
            return False
        known = set(map(id, self._modules))
        if any(id(m) not in known for m in self._module.modules()):
            return True
        parameters = (p for p in self._module.parameters() if isinstance(p, torch.nn.Parameter))
        if any(p not in self._weights for p in parameters):
            return True
        self.see()
        return False


def move_buffers(module: torch.nn.Module, device: torch.device, undo: ExitStack) -> None:
    """Move the buffers of a module's parts to a device; ``undo`` gets what brings them back.

    One that is there already stays as it is.
    """
    moved: dict[int, torch.Tensor] = {}  # by id of the tensor before; two parts may share it

    def restore(owner: torch.nn.Module, name: str, before: torch.Tensor, now: torch.Tensor) -> None:
        if owner._buffers.get(name) is now:
            with torch.no_grad(), torch.inference_mode(before.is_inference()):
                before.copy_(now)
            owner._buffers[name] = before

    for owner in module.modules():
        for name, before in owner._buffers.items():
            if before is None:
                continue
            if id(before) not in moved:
                moved[id(before)] = before.to(device)
            now = moved[id(before)]
            if now is not before:
                owner._buffers[name] = now
                undo.callback(restore, owner, name, before, now)


def eager_where_refused(
    compiled: Callable[..., Any], module: torch.nn.Module, num_runs: Callable[[], int]
) -> Callable[..., Any]:
    """Return a compiled call that runs eagerly where Dynamo fails.

    A forward may take another path while it is traced (transformers makes masks then that it leaves
    out otherwise), and fail there. The modules that run without a graph are counted. ``num_runs``
    counts the graphs that ran: a call can start again if none of its own did.
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
