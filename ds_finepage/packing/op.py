"""The op that multiplies by a packed weight.

It is one op to torch, so one task of a plan. It unpacks ``SLICE_ROWS`` rows of the weight at a time
and multiplies by them, so a whole weight is never unpacked.

[Note: slices are products of their own]
Slices begin at multiples of ``SLICE_ROWS``, and each is a product by itself. So the outputs of a
slice are the same bits, whether other slices are computed with it or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_finepage.graph.packed import SLICE_ROWS
from ds_finepage.packing.form import WIDE_ROWS, Packed, PackedForm, unpack

NAME = "ds_finepage::packed_linear"

_ARGUMENTS = (
    "Tensor x, Tensor numbers, Tensor scales, Tensor minima, Tensor? bias, int bits, int group"
)
_LIBRARY = torch.library.Library("ds_finepage", "DEF")
_LIBRARY.define(f"packed_linear({_ARGUMENTS}) -> Tensor")
_LIBRARY.define(f"packed_linear.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)")


def workspace_bytes(
    numbers: Sequence[int], scales: Sequence[int], *, group: int, itemsize: int
) -> int:
    """Return the bytes that the op takes for itself: the largest slice, unpacked.

    On a CPU it takes fewer in some forms.

    Args:
        numbers: Shape of the numbers.
        scales: Shape of the scales.
        group: Weights that share a scale.
        itemsize: Bytes of an unpacked weight.
    """
    width, num_rows = scales[1] * group, min(SLICE_ROWS, numbers[0])
    halves = 0 if numbers[1] == width else numbers[1]  # numbers of 4 bits are taken apart first
    wide = width * torch.float32.itemsize if itemsize < torch.float32.itemsize else 0
    beside = max(num_rows * halves, min(WIDE_ROWS, num_rows) * (wide + max(halves, wide // group)))
    return num_rows * width * itemsize + beside


@torch.no_grad()
def _into(
    x: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor,
    bias: torch.Tensor | None,
    bits: int,
    group: int,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write ``x @ weight.T + bias`` into a tensor.

    Args:
        x: (..., in).
        numbers: Of the packed weight; see :class:`ds_finepage.packing.form.Packed`.
        scales: Of the packed weight.
        minima: Of the packed weight.
        bias: (out,), or none.
        bits: Of a number.
        group: Weights that share a scale.
        out: (..., out), contiguous.
    """
    form, packed = PackedForm(bits, group), Packed(numbers, scales, minima)
    rows, results = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    for begin in range(0, numbers.shape[0], SLICE_ROWS):
        span = slice(begin, begin + SLICE_ROWS)
        weight = unpack(Packed(*(part[span] for part in packed)), form, x.dtype)
        result = results[:, span]
        if bias is None:
            torch.mm(rows, weight.t(), out=result)
        else:
            torch.addmm(bias[span], rows, weight.t(), out=result)
        del weight  # before the next slice is made
    return out


def _new(x: torch.Tensor, numbers: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], numbers.shape[0]))


def _packed_linear(x: torch.Tensor, numbers: torch.Tensor, *others: Any) -> torch.Tensor:
    return _into(x, numbers, *others, out=_new(x, numbers))


_LIBRARY.impl("packed_linear", _packed_linear, "CompositeExplicitAutograd")
_LIBRARY.impl("packed_linear.out", _into, "CompositeExplicitAutograd")
torch.library.register_fake(NAME, _new)

packed_linear = torch.ops.ds_finepage.packed_linear
