"""Products with a packed weight that a CPU unpacks in registers.

They need a C compiler (``compiler.py``). Without one the CPU unpacks a slice of the weight into
memory first, which takes twelve times as long with one row of activations (int4, two cores with
AVX-512).

A row of the weight is unpacked once more for each row of activations. So the gain is gone with more
than ``FEW_ROWS`` of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ds_finepage.compiler import compiled, num_threads
from ds_finepage.graph.packed import FEW_ROWS
from ds_finepage.packing.form import Packed, PackedForm

SOURCE = Path(__file__).with_name("product.c")

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
    run(
        *(tensor.data_ptr() for tensor in (*parts, wide, sums, found)),
        *(found.shape[1], len(wide), sums.shape[1], form.group),
        *(form.bits, DTYPES.index(packed.scales.dtype)),
        num_threads(torch.get_num_threads()),
    )
    results.copy_(found if bias is None else found.add_(bias))


def _compiled() -> Callable[..., Any] | str:
    return compiled(SOURCE, "products", pointers=6, longs=4, ints=3)
