"""Compiles C for the processor of this machine.

It takes a C compiler, as Triton does for its kernels, and a tenth of a second, once a process.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")


@functools.cache
def compiled(
    source: Path, name: str, *, pointers: int, longs: int, ints: int
) -> Callable[..., Any] | str:
    """Return a function of a C file, or the reason why there is none.

    Args:
        source: The file.
        name: Of the function, which returns nothing.
        pointers: It takes so many addresses first.
        longs: Then so many numbers of type long.
        ints: Then so many of type int.
    """
    _compiled_in()
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "there is no C compiler"
    with TemporaryDirectory() as folder:
        library = Path(folder, f"{source.stem}.so")
        try:
            command = (*compiler.split(), *FLAGS, str(source), "-o", str(library), "-lm")
            subprocess.run(command, check=True, capture_output=True, text=True)
            found: Any = ctypes.CDLL(str(library))[name]  # it stays when its file has gone
        except subprocess.CalledProcessError as error:
            return f"{compiler} failed: {error.stderr.strip()[:300]}"
        except OSError as error:
            return f"{compiler}: {error}"
    given = [ctypes.c_void_p] * pointers, [ctypes.c_long] * longs, [ctypes.c_int] * ints
    found.argtypes, found.restype = [kind for kinds in given for kind in kinds], None
    return found  # type: ignore[no-any-return]


def num_threads(wanted: int) -> int:
    """Return the threads that a compiled function may have here: OpenMP's are not in a child."""
    return wanted if os.getpid() == _compiled_in() else 1


@functools.cache
def _compiled_in() -> int:
    return os.getpid()
