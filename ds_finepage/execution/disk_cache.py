"""Finds the folder that keeps plans for the next process, in the user's cache.

The folder is ``$XDG_CACHE_HOME/ds_finepage`` or ``~/.cache/ds_finepage``. The environment variable
``DS_FINEPAGE_CACHE`` names another one; empty or ``0`` switches the cache off. Each environment
(versions, source code, device, threads) has a folder of its own. Files are JSON; nothing in them is
run. A cache that cannot be used costs time and nothing else: a warning is logged, and plans are
made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ds_finepage.execution.device import device_of
from ds_finepage.files import CACHE_VARIABLE

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
"""Beyond that, the files that were not used for longest go."""

PACKAGE = Path(__file__).parents[1]


def cache_root() -> Path | None:
    """Return the cache folder; None where it is switched off."""
    named = os.environ.get(CACHE_VARIABLE)
    if named is not None:
        return None if named in ("", "0") else Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "ds_finepage"
    except RuntimeError:  # there is no home folder
        return None


def environment_of(device: torch.device) -> str:
    """Return a short hash of everything that plans depend on, beside the graph."""
    names = ("torch", "transformers", "ds_finepage")
    found = (
        [_version(n) for n in names],
        source_digest(PACKAGE),
        platform.python_version(),
        [device.type, device_of(device).name, platform.processor(), platform.machine()],
        torch.backends.cpu.get_cpu_capability(),
        torch.get_num_threads(),
    )
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


@cache
def source_digest(folder: Path) -> str:
    """Return a hash of all Python files in a folder.

    Plans depend on the code that made them, and code changes more often than its version.
    """
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)}\0".encode())
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def open_plan_folder(device: torch.device) -> Path | None:
    """Return the folder for plans of this environment; None where there can be no cache."""
    root = cache_root()
    if root is None:
        return None
    folder = root / environment_of(device) / "plans"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
        trim(root)
    except OSError as error:
        logger.warning("the cache of ds_finepage cannot be used: %s", error)
        return None
    return folder


def trim(root: Path) -> None:
    """Remove the files that were not used for longest, until the rest is small enough."""
    found = []
    for path in root.rglob("*"):
        try:
            status = path.stat()
        except OSError:
            continue  # another process has removed it
        if path.is_file():
            found.append((status.st_mtime_ns, status.st_size, path))
    total = sum(nbytes for _, nbytes, _ in found)
    for _, nbytes, path in sorted(found):
        if total <= MAX_BYTES:
            return
        path.unlink(missing_ok=True)
        total -= nbytes
