"""Products with a packed weight that unpack in registers; see [Note: a fused product].

They need Triton, and a device that it compiles for. torch brings Triton in its builds for CUDA,
ROCm and XPU; its build for the CPU has none.

[Note: bytes in flight]
A product with one row of activations reads the weight once and does little else. So it takes as
long as the reading, if rate x latency bytes are on their way at any time. Device memory answers an
A100, H100 or RTX 4090 after 466 to 542 cycles, about 300 ns, when it is idle (Luo et al. 2024,
Benchmarking and Dissecting the Nvidia Hopper GPU Architecture); take 400. An H200 needs
4800 GB/s x 400 ns = 1.9 MB. A weight of 4096 rows offers 4096 x 512 bytes = 2.1 MB, because all its
rows are read side by side, 512 bytes each. A multiprocessor of it needs 36 GB/s x 400 ns = 14.5 kB.
A program has 8 x 512 bytes in flight, and scales and minima, 4.6 kB in int4. 128 registers a thread
leave room for four programs of 128 threads, so 18 kB. Fewer bytes and more rows would be the same
for a multiprocessor, but too little for a small weight.

A product with several rows keeps a tile of the weight in registers. With 64 bytes at a time this
tile took all of them, and spilled on sm_70 and sm_75, where packed bytes are not aligned.
"""

from __future__ import annotations

import functools
import importlib
from importlib.util import find_spec
from typing import Any

import torch

from ds_finepage.packing.form import Packed, PackedForm

KERNEL = "ds_finepage.packing.kernel"
"""The module that imports Triton."""

MOST_RUN_BYTES = 64
"""Packed bytes of a group that a program reads of a row together."""

BYTES_AT_ONCE = {True: 512, False: 32}
"""Packed bytes of a row of the weight that a program reads at a time: for one row of activations,
and for several; see [Note: bytes in flight]."""

OUTPUTS = {True: 8, False: 32}
"""Likewise, rows of the weight that a program takes."""


@functools.cache
def why_not(where: torch.device) -> str | None:
    """Say why a device runs no fused products; None if it runs them."""
    if find_spec("triton") is None:
        return "Triton is not installed; it comes with torch's builds for accelerators"
    from triton.runtime import driver

    try:
        compiled_for = driver.active.get_active_torch_device().type
    except RuntimeError:  # it finds no device
        compiled_for = None
    is_fit = compiled_for == where.type
    return None if is_fit else f"Triton does not compile for {where.type!r} here"


@torch.no_grad()
def fused_product(
    rows: torch.Tensor,
    packed: Packed,
    bias: torch.Tensor | None,
    form: PackedForm,
    results: torch.Tensor,
    ends: torch.Tensor | None = None,
) -> None:
    """Multiply few rows by a packed matrix, or each by that of its expert.

    Args:
        rows: (rows, in): at most ``FUSED_ROWS``, if there are no experts.
        packed: The packed matrix, or those of experts one behind the other.
        bias: (out,), or none; experts have none.
        form: How it is packed.
        results: (rows, out), or the columns of a cut weight in it: gets the products.
        ends: (experts,), where the rows of each expert end. Rows behind the last end become 0.
    """
    kernel: Any = importlib.import_module(KERNEL)
    num_rows, num_out = results.shape
    constants = constants_of(
        form,
        num_groups=packed.scales.shape[-1],
        num_experts=0 if ends is None else len(ends),
        is_alone=num_rows == 1 or ends is not None,
    )
    grid = (-(-num_out // constants["OUTPUTS"]), 1 if ends is None else num_rows)
    # Triton starts its kernels on the current device; a CPU has no index, and stays as it is.
    with torch.accelerator.device_index(rows.device.index):
        kernel.product[grid](
            rows.contiguous(),
            *(part.contiguous() for part in packed),
            results if bias is None else bias,
            results if ends is None else ends,
            results,
            num_out,
            num_rows,
            results.stride(0),
            HAS_BIAS=bias is not None,
            **constants,
        )


def constants_of(
    form: PackedForm, *, num_groups: int, num_experts: int, is_alone: bool
) -> dict[str, Any]:
    """Return the arguments that the kernel is compiled for, but whether there is a bias.

    Nothing of them follows from the number of rows of the weight.

    Args:
        form: How the weight is packed.
        num_groups: In a row of the weight.
        num_experts: 0 for a single matrix.
        is_alone: Each program multiplies one row of activations.
    """
    at_once = BYTES_AT_ONCE[is_alone]
    run = min(_power_of_2(form.group * form.bits // 8), MOST_RUN_BYTES, at_once)
    return {
        "BITS": form.bits,
        "GROUP": form.group,
        "GROUPS": num_groups,
        "NUM_EXPERTS": num_experts,
        "EXPERTS": _power_of_2(num_experts),
        "ALONE": is_alone,
        "OUTPUTS": OUTPUTS[is_alone],
        "RUNS": at_once // run,
        "RUN": run,
    }


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
