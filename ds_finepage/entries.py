"""Where calls of a model are taken over, and how that is undone (floor 3)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.external_utils import wrap_inline

from ds_finepage.execution.stores import WeightTable

MIN_RECOMPILES = 64
"""Dynamo's own limit of 8 graphs a function is too low where a graph break makes one a layer."""


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
    if has_own or torch._dynamo.trace_rules.check(module.forward):
        return wrap_inline(module._call_impl)
    return module._call_impl


def attribute_restorer(owner: Any, name: str) -> Callable[[], None]:
    """Return what gives an object's own attribute back, or its absence."""
    if name not in vars(owner):
        return lambda: delattr(owner, name)
    before = vars(owner)[name]
    return lambda: setattr(owner, name, before)


def allow_recompiles() -> Callable[[], None]:
    """Raise Dynamo's recompile limit; return what restores it."""
    config = torch._dynamo.config
    before = config.recompile_limit
    if before >= MIN_RECOMPILES:
        return lambda: None
    config.recompile_limit = MIN_RECOMPILES

    def restore() -> None:
        config.recompile_limit = before

    return restore
