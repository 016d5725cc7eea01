"""Changes a model of FakeTensors by a function that looks at values, as packing does.

Reads and changes the modules of the model; the FakeTensors are on the CPU before and after.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ds_finepage._compat.torch import _disable_current_modes


def prepare_shapes(
    model: torch.nn.Module, prepare: Callable[[torch.nn.Module], object] | None
) -> None:
    """Let a function change a model whose weights have no values.

    Its parameters are on the meta device meanwhile. There such functions make shapes only, while
    of a FakeTensor on the CPU they would ask for values.
    """
    if prepare is None:
        return
    with _disable_current_modes():
        _move_parameters(model, "meta")
        prepare(model)
    _move_parameters(model, "cpu")


def _move_parameters(model: torch.nn.Module, device: str) -> None:
    """Make all parameters on a device; tied ones stay tied."""
    moved: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if old not in moved:
                empty = torch.empty(old.shape, dtype=old.dtype, device=device)
                moved[old] = torch.nn.Parameter(empty, requires_grad=old.requires_grad)
            setattr(module, name, moved[old])
