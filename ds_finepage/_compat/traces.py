"""Names the private parts of torch that keeping Dynamo's traces needs: some releases have all.

In other releases each process traces again.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

RELEASES = ("2.13",)

CAN_KEEP_TRACES = ".".join(version("torch").split(".")[:2]) in RELEASES

if CAN_KEEP_TRACES:
    from torch._C._dynamo.eval_frame import _load_precompile_entry, _reset_precompile_entries
    from torch._dynamo.bytecode_transformation import unique_id
    from torch._dynamo.convert_frame import convert_frame
    from torch._dynamo.eval_frame import _optimize_catch_errors
    from torch._dynamo.guards import (
        CheckFunctionManager,
        GuardsState,
        convert_int_to_concrete_values,
    )
    from torch._dynamo.hooks import Hooks
    from torch._dynamo.output_graph import OutputGraphCommon, get_builtins_dict
    from torch._dynamo.package import SerializedCode
    from torch._guards import GuardsSet
    from torch.fx._graph_pickler import GraphPickler, Options
    from torch.utils._ordered_set import OrderedSet

    __all__ = [
        "CheckFunctionManager",
        "GraphPickler",
        "GuardsSet",
        "GuardsState",
        "Options",
        "OrderedSet",
        "OutputGraphCommon",
        "SerializedCode",
        "_load_precompile_entry",
        "_reset_precompile_entries",
        "compiled",
        "convert_int_to_concrete_values",
        "get_builtins_dict",
        "unique_id",
    ]


def compiled(
    function: Callable[..., Any], backend: Callable[..., Any], package: Any
) -> Callable[..., Any]:
    """Return what ``torch.compile`` returns, with a package.

    ``torch.compile`` imports torch's own backends, which takes a third of a second. Where a kept
    trace serves, nothing else needs them.
    """
    hooks = Hooks()
    context = _optimize_catch_errors(
        convert_frame(backend, hooks, package=package), hooks, package=package
    )
    found: Callable[..., Any] = context(function)
    return found
