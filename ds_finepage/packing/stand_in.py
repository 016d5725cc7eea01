"""A draft that is made of the model itself: its own layers, and packed copies of some of them.

The stand-in is a second tree of modules over the same objects. Only the modules on the way to a
packed copy are new, so weights that both have are there once. Its layers have the places in the
tree that the model's have, so both use one KV cache.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch

from ds_finepage.packing.form import PackedForm
from ds_finepage.packing.model import packed_copy


def stand_in_for(model: Any, names: Collection[str], form: PackedForm) -> Any:
    """Return a model that has packed copies in the places of some layers.

    Args:
        model: The model. It is not attached, so its modules are its own.
        names: The layers to pack, from :func:`ds_finepage.packing.model.layers_to_pack`.
        form: How to pack.

    Raises:
        ConfigError: The form does not suit a weight.
    """
    made = _copy_of(model, "", names)
    for name in names:
        made.set_submodule(name, packed_copy(model, name, form))
    return made


def _copy_of(module: torch.nn.Module, path: str, names: Collection[str]) -> Any:
    """Copy the modules that hold a layer of ``names``; the others stay the same objects."""
    prefix = f"{path}." if path else ""
    if not any(name.startswith(prefix) for name in names):
        return module
    made = copy.copy(module)
    for name, value in vars(module).items():
        if name.endswith(("_hooks", "_parameters", "_buffers")) and isinstance(value, dict):
            made.__dict__[name] = OrderedDict(value)
    made.__dict__["_modules"] = {
        name: None if part is None else _copy_of(part, prefix + name, names)
        for name, part in module._modules.items()
    }
    return made
