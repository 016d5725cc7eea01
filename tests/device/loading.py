"""Compile slowcard.cpp once, load it, and make `torch.slowcard` of it.

``load()`` returns the device; ``why_not()`` says why there is none. The build is kept in a folder
by the hash of the source and torch's version (``SLOWCARD_BUILD``, else torch's own folder for
extensions), so a test suite compiles once, and again only after a change.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import pathlib
import shutil
import sys
from types import ModuleType

import torch
from torch.utils import cpp_extension

NAME = "slowcard"
SOURCE = pathlib.Path(__file__).with_name("slowcard.cpp")
FLAGS = ["-O2", "-g0", "-Wno-attributes"]


class DeviceMissing(RuntimeError):
    """The test device cannot be had here; the message says why."""


def why_not() -> str | None:
    """Say why the test device cannot be loaded here; None if it can."""
    if not sys.platform.startswith("linux"):
        return "the test device needs Linux"
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", NAME):
        return f"torch already has the device {name!r} in its place"
    if _compiled_file().exists():
        return None
    for tool in (os.environ.get("CXX", "g++"), "ninja"):
        if shutil.which(tool) is None:
            return f"the test device must be compiled, and {tool} is not there"
    return None


def load(num_devices: int = 1) -> torch.device:
    """Load the test device, compiling it if need be.

    Args:
        num_devices: how many devices there are from now on (0 to 4).

    Returns:
        The first device, ``slowcard:0``.

    Raises:
        DeviceMissing: there is no compiler, or another device has its place.
    """
    card = _register()
    card.set_num_devices(num_devices)
    return torch.device(NAME, 0)


@functools.cache
def _register() -> ModuleType:
    if reason := why_not():
        raise DeviceMissing(reason)
    extension = _build()
    torch.utils.rename_privateuse1_backend(NAME)
    from tests.device import card

    card.connect(extension)
    torch._register_device_module(NAME, card)
    torch.utils.generate_methods_for_privateuse1_backend()
    return card


def _compiled_file() -> pathlib.Path:
    key = hashlib.sha256()
    for part in (SOURCE.read_bytes(), torch.__version__, sys.version, FLAGS):
        key.update(part if isinstance(part, bytes) else str(part).encode())
    root = os.environ.get("SLOWCARD_BUILD") or cpp_extension.get_default_build_root()
    return pathlib.Path(root) / f"{NAME}_{key.hexdigest()[:16]}" / f"{NAME}.so"


def _build() -> ModuleType:
    file = _compiled_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.parent / "building", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # let go of when the process ends, however it ends
        if not file.exists():
            # torch's own lock stays behind when a compiling process is killed.
            (file.parent / "lock").unlink(missing_ok=True)
            try:
                return cpp_extension.load(
                    NAME, [str(SOURCE)], extra_cflags=FLAGS, build_directory=str(file.parent)
                )
            except BaseException:
                file.unlink(missing_ok=True)  # perhaps half of it was written
                raise
    return _import(file)


def _import(file: pathlib.Path) -> ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(file))
    spec = importlib.util.spec_from_file_location(NAME, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
