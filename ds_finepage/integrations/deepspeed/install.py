"""Installs the seams without importing the packages that they change.

DeepSpeed and transformers have no entry points. ``import ds_finepage`` is the explicit, documented
act. A seam goes in at once if its module is loaded, else as soon as the module is loaded. So the
order of the imports does not matter, and a program that only plans never loads torch.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import wrapt

SEAMS = {
    "deepspeed.runtime.engine": f"{__package__}.seam",
    "transformers.modeling_utils": f"{__package__}.loading",
}
"""Module -> the seam that changes it."""

_waiting: dict[str, bool] = {}
"""Module that is not loaded yet -> whether its seam goes in when it is loaded."""


def install() -> None:
    """Install the seams, now or when their modules are loaded; a second call does nothing."""
    for name in SEAMS:
        is_registered = name in _waiting
        _waiting[name] = True
        if not is_registered:
            wrapt.register_post_import_hook(_loaded, name)  # calls it at once for a loaded module


def uninstall() -> None:
    """Remove the seams; engines that exist keep what they have."""
    for name in SEAMS:
        if name in _waiting:
            _waiting[name] = False
        module = sys.modules.get(name)
        if module is not None:
            _seam_of(name).uninstall(module)


def _loaded(module: ModuleType) -> None:
    if _waiting.pop(module.__name__):
        _seam_of(module.__name__).install(module)


def _seam_of(name: str) -> ModuleType:
    return importlib.import_module(SEAMS[name])
