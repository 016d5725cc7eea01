"""Installs the DeepSpeed seam without importing DeepSpeed (floor 4).

DeepSpeed has no entry points. ``import ds_finepage`` is the explicit, documented act; where
DeepSpeed is not loaded yet, a finder on ``sys.meta_path`` waits for its engine module, so that the
order of the two imports does not matter and a program that only plans never loads torch.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

ENGINE_MODULE = "deepspeed.runtime.engine"


class _EngineFinder(importlib.abc.MetaPathFinder):
    """Finds the engine module as usual and sees to it that the seam is put in once it is loaded."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != ENGINE_MODULE:
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
        install()


def install() -> None:
    """Put the seam in, now or when DeepSpeed's engine is imported; a second call does nothing."""
    engine = sys.modules.get(ENGINE_MODULE)
    if engine is not None and hasattr(engine, "DeepSpeedEngine"):
        import ds_finepage.integrations.seam as seam

        seam.install(engine)
    elif not any(isinstance(finder, _EngineFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _EngineFinder())


def uninstall() -> None:
    """Take the seam out again; engines that exist keep what they have."""
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _EngineFinder)]
    engine = sys.modules.get(ENGINE_MODULE)
    if engine is not None:
        import ds_finepage.integrations.seam as seam

        seam.uninstall(engine)
