"""Installs the seams without importing what they are put into.

DeepSpeed and transformers have no entry points. ``import ds_finepage`` is the explicit, documented
act; where they are not loaded yet, finders on ``sys.meta_path`` wait for the modules, so that the
order of the imports does not matter and a program that only plans never loads torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

SEAMS = {
    "deepspeed.runtime.engine": (f"{__package__}.seam", "DeepSpeedEngine"),
    "transformers.modeling_utils": (
        f"{__package__}.loading",
        "PreTrainedModel",
    ),
}
"""The modules, each with its seam and the class that it has once it is loaded."""


class _SeamFinder(importlib.abc.MetaPathFinder):
    """Finds one module as usual and sees to it that the seam is put in once it is loaded."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _SeamLoader(spec.loader)
        return spec


class _SeamLoader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _seam_of(module.__name__).install(module)


def _seam_of(name: str) -> ModuleType:
    return importlib.import_module(SEAMS[name][0])


def install() -> None:
    """Put the seams in, now or when their modules are imported; a second call does nothing."""
    waiting = {finder.module for finder in sys.meta_path if isinstance(finder, _SeamFinder)}
    for name, (_, loaded_class) in SEAMS.items():
        module = sys.modules.get(name)
        if module is not None and hasattr(module, loaded_class):
            _seam_of(name).install(module)
        elif name not in waiting:
            sys.meta_path.insert(0, _SeamFinder(name))


def uninstall() -> None:
    """Take the seams out again; engines that exist keep what they have."""
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _SeamFinder)]
    for name in SEAMS:
        module = sys.modules.get(name)
        if module is not None:
            _seam_of(name).uninstall(module)
