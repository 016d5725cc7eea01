"""The kernel of packed weights against the product that unpacks first, as a device runs both.

python benchmarks/day_kernel.py --device cuda
"""

from __future__ import annotations

import sys

import torch
from day_common import device_of, parser_of, reason_of, report, seconds_of

from ds_finepage.packing.form import Packed, PackedForm, pack
from ds_finepage.packing.fused import why_not
from ds_finepage.packing.op import packed_linear

WIDTH = 4096
TINY_WIDTH = 256
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def compared(device: torch.device, width: int, bits: int, dtype: torch.dtype, rows: int) -> bool:
    """Report one form of the kernel; say whether it agrees.

    Args:
        device: With or without the kernel; without it both products unpack first.
        width: Of the weight, both ways.
        bits: Of a packed number.
        dtype: Of the activations.
        rows: Of the activations.
    """
    form = PackedForm(bits)
    weight = torch.randn(width, width, dtype=dtype)
    packed = Packed(*(part.to(device) for part in pack(weight, form)))
    x = torch.randn(rows, width, dtype=dtype).to(device)

    def product(is_fused: bool) -> torch.Tensor:
        return packed_linear(x, *packed, None, form.bits, form.group, is_fused)

    given, wanted = product(True).double(), product(False).double()
    # A sum of so many terms, rounded in another order, and then to the dtype.
    off = ((given - wanted).abs().max() / wanted.abs().max()).item()
    is_close = off <= 4 * torch.finfo(dtype).eps
    fused_s, sliced_s = (
        min(seconds_of(lambda is_fused=is_fused: product(is_fused), device))
        for is_fused in (True, False)
    )
    report(
        "kernel",
        form=form.name,
        dtype=str(dtype).removeprefix("torch."),
        rows=rows,
        off=off,
        agrees=is_close,
        fused_us=fused_s * 1e6,
        sliced_us=sliced_s * 1e6,
    )
    return is_close


def main() -> int:
    """Compare every form; return the exit status."""
    arguments = parser_of(__doc__).parse_args()
    device = device_of(arguments)
    torch.manual_seed(0)
    report("kernel", remark=why_not(device) or "compiled for this device")
    is_good = True
    for bits in (4, 8):
        for name, dtype in DTYPES.items():
            for rows in (1, 5, 16):
                try:
                    width = TINY_WIDTH if arguments.tiny else WIDTH
                    is_good &= compared(device, width, bits, dtype, rows)
                except Exception as error:  # the other forms may still work
                    report("kernel", form=f"int{bits} {name}, {rows} rows", remark=reason_of(error))
                    is_good = False
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
