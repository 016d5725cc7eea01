"""Products with a packed weight that a CPU unpacks in registers.

They need a C compiler, as Triton does for its kernels. It takes a tenth of a second, once a
process. Without one the CPU unpacks a slice of the weight into memory first, which takes twelve
times as long with one row of activations (int4, two cores with AVX-512).

A row of the weight is unpacked once more for each row of activations. So the gain is gone with more
than ``FEW_ROWS`` of them.
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

import torch

from ds_finepage.graph.packed import FEW_ROWS
from ds_finepage.packing.form import Packed, PackedForm

SOURCE = Path(__file__).with_name("product.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Those of scales that the kernel reads, as it numbers them."""


def takes(rows: torch.Tensor, packed: Packed) -> bool:
    """Tell whether rows of activations are multiplied so.

    It depends on nothing that cutting a weight changes.
    """
    return (
        rows.is_cpu
        and 0 < len(rows) <= FEW_ROWS
        and packed.scales.dtype in DTYPES
        and why_not() is None
    )


def why_not() -> str | None:
    """Say why this machine has no such products; None if it has."""
    found = _compiled()
    return found if isinstance(found, str) else None


def product(
    rows: torch.Tensor,
    packed: Packed,
    bias: torch.Tensor | None,
    form: PackedForm,
    results: torch.Tensor,
) -> None:
    """Multiply few rows of activations by a packed matrix.

    Each result is made by itself, so it is the same in any cut of the matrix, beside any other
    rows, and with any number of threads.

    Args:
        rows: (rows, in), as :func:`takes` takes them.
        packed: The packed matrix.
        bias: (out,), or none.
        form: How it is packed.
        results: (rows, out), or the columns of a cut weight in it: gets the products.
    """
    run = _compiled()
    assert not isinstance(run, str), "takes() has compiled it"
    wide = rows.float().contiguous()
    sums = wide.unflatten(1, (-1, form.group)).sum(-1)  # what a group's minimum is multiplied by
    found = torch.empty(results.shape, dtype=torch.float32)
    parts = [part.contiguous() for part in packed]
    # OpenMP's threads are not there in a child process.
    num_threads = torch.get_num_threads() if os.getpid() == _compiled_in() else 1
    run(
        *(tensor.data_ptr() for tensor in (*parts, wide, sums, found)),
        *(found.shape[1], len(wide), sums.shape[1], form.group),
        *(form.bits, DTYPES.index(packed.scales.dtype), num_threads),
    )
    results.copy_(found if bias is None else found.add_(bias))


@functools.cache
def _compiled_in() -> int:
    return os.getpid()


@functools.cache
def _compiled() -> Callable[..., Any] | str:
    """Return the function of ``SOURCE``, or the reason why there is none."""
    _compiled_in()
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "there is no C compiler"
    with TemporaryDirectory() as folder:
        library = Path(folder, "product.so")
        try:
            command = (*compiler.split(), *FLAGS, str(SOURCE), "-o", str(library))
            subprocess.run(command, check=True, capture_output=True, text=True)
            found = ctypes.CDLL(str(library)).products  # it stays when its file has gone
        except subprocess.CalledProcessError as error:
            return f"{compiler} failed: {error.stderr.strip()[:300]}"
        except OSError as error:
            return f"{compiler}: {error}"
    found.argtypes = (*[ctypes.c_void_p] * 6, *[ctypes.c_long] * 4, *[ctypes.c_int] * 3)
    found.restype = None
    return found
