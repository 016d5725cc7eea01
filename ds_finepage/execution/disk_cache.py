"""Keeps what was found out about ops in the user's cache folder.

The folder is ``$XDG_CACHE_HOME/ds_finepage`` or ``~/.cache/ds_finepage``. The environment variable
``DS_FINEPAGE_CACHE`` names another one; empty or ``0`` switches the cache off. Each environment
(versions, source code, device, threads) has a folder of its own. Files are JSON; nothing in them is
run. A cache that cannot be used costs time and nothing else: a warning is logged once, and all is
found out again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from ds_finepage.errors import ConfigError
from ds_finepage.execution.device import device_of
from ds_finepage.files import CACHE_VARIABLE, write_file

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
"""Beyond that, the files that were not used for longest go."""

MAX_ENTRIES = 20_000
"""Entries of one table; beyond, the oldest go."""

PACKAGE = Path(__file__).parents[1]

_T = TypeVar("_T")
_said: set[str] = set()


def _warn(reason: str) -> None:
    """Say once in a process that the cache cannot be used."""
    if not _said:
        logger.warning("the cache of ds_finepage cannot be used: %s", reason)
    _said.add(reason)


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
    """Return a short hash of everything that measurements and plans depend on, beside the op."""
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

    Plans and costs depend on the code that made them, and code changes more often than its version.
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


def open_folder(device: torch.device) -> Path | None:
    """Return the folder of this environment, made if need be; None where there can be no cache."""
    root = cache_root()
    if root is None:
        return None
    folder = root / environment_of(device)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
        trim(root)
    except OSError as error:
        _warn(str(error))
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


class Table:
    """A dictionary of JSON values in one file, by the hash of what is looked up."""

    def __init__(self, name: str, device: torch.device) -> None:
        """Name the table; nothing is read before the first look."""
        self._name = name
        self._device = device
        self._path: Path | None = None
        self._entries: dict[str, Any] | None = None
        self._new: dict[str, Any] = {}

    def get(self, key: Any, parse: Callable[[Any], _T]) -> _T | None:
        """Return an entry; None where there is none, or none that ``parse`` takes.

        Args:
            key: Any object whose ``repr`` says all of it.
            parse: Turns the JSON value into the entry; raises TypeError or ValueError for another.
        """
        if self._entries is None:
            folder = open_folder(self._device)
            self._path = None if folder is None else folder / f"{self._name}.json"
            self._entries = self._read()
        value = self._entries.get(_hash(key))
        if value is None:
            return None
        try:
            return parse(value)
        except (TypeError, ValueError) as error:
            _warn(f"{self._path}: {error}")
            return None

    def put(self, key: Any, value: Any) -> None:
        """Add an entry; :meth:`save` writes it."""
        self._new[_hash(key)] = value

    def save(self) -> None:
        """Write new entries, beside those that other processes have written meanwhile."""
        if not self._new or self._path is None:
            return
        entries = {**self._read(), **self._new}
        for key in list(entries)[: max(0, len(entries) - MAX_ENTRIES)]:
            del entries[key]
        self._entries, self._new = entries, {}
        try:
            write_file(self._path, json.dumps(entries))
        except (ConfigError, OSError) as error:
            _warn(str(error))
            self._path = None

    def _read(self) -> dict[str, Any]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            if not isinstance(found, dict):
                raise ValueError(f"{self._path} holds no object")
            os.utime(self._path)  # the files that are used stay
        except (OSError, ValueError, RecursionError) as error:
            _warn(str(error))
            return {}
        return found


def _hash(key: Any) -> str:
    return hashlib.sha256(repr(key).encode()).hexdigest()[:32]
