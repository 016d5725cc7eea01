"""The ops that multiply by packed weights.

Each is one op to torch, so one task of a plan. It unpacks ``SLICE_ROWS`` rows of a weight at a time
and multiplies by them, so a whole weight is never unpacked. Experts without rows are not unpacked.
So the host reads from the device how many rows each has.

[Note: slices are products of their own]
Slices begin at multiples of ``SLICE_ROWS``, and each is a product by itself. So the outputs of a
slice are the same bits, whether other slices are computed with it or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_finepage.graph.packed import SLICE_ROWS
from ds_finepage.packing.form import WIDE_ROWS, Packed, PackedForm, unpack

_WEIGHT = "Tensor x, Tensor numbers, Tensor scales, Tensor minima"
_ARGUMENTS = {
    "packed_linear": f"{_WEIGHT}, Tensor? bias, int bits, int group",
    "packed_grouped_linear": f"{_WEIGHT}, Tensor ends, int bits, int group",
}
_LIBRARY = torch.library.Library("ds_finepage", "DEF")


def workspace_bytes(
    numbers: Sequence[int], scales: Sequence[int], *, group: int, itemsize: int
) -> int:
    """Return the bytes that an op takes for itself: the largest slice, unpacked.

    On a CPU it takes fewer in some forms.

    Args:
        numbers: Shape of the numbers, of one matrix or of several.
        scales: Shape of the scales.
        group: Weights that share a scale.
        itemsize: Bytes of an unpacked weight.
    """
    width, num_rows = scales[-1] * group, min(SLICE_ROWS, numbers[-2])
    halves = 0 if numbers[-1] == width else numbers[-1]  # numbers of 4 bits are taken apart first
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
    rows, results = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    packed = Packed(numbers, scales, minima)
    _multiply(rows, packed, bias, PackedForm(bits, group), results)
    return out


@torch.no_grad()
def _grouped_into(
    x: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor,
    ends: torch.Tensor,
    bits: int,
    group: int,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write the product of each row with the matrix of its expert into a tensor.

    Args:
        x: (rows, in), sorted by expert.
        numbers: Of the packed matrices, (experts, ...); each matrix is packed by itself.
        scales: Of the packed matrices.
        minima: Of the packed matrices.
        ends: (experts,), where the rows of each expert end. Rows behind the last end become 0.
        bits: Of a number.
        group: Weights that share a scale.
        out: (rows, out).
    """
    form, begin = PackedForm(bits, group), 0
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            packed = Packed(numbers[expert], scales[expert], minima[expert])
            _multiply(x[begin:end], packed, None, form, out[begin:end])
            begin = end
    out[begin:].zero_()
    return out


def _multiply(
    rows: torch.Tensor,
    packed: Packed,
    bias: torch.Tensor | None,
    form: PackedForm,
    results: torch.Tensor,
) -> None:
    """Multiply rows by one packed matrix, a slice of it after another."""
    for begin in range(0, packed.numbers.shape[0], SLICE_ROWS):
        span = slice(begin, begin + SLICE_ROWS)
        weight = unpack(Packed(*(part[span] for part in packed)), form, rows.dtype)
        result = results[:, span]
        if bias is None:
            torch.mm(rows, weight.t(), out=result)
        else:
            torch.addmm(bias[span], rows, weight.t(), out=result)
        del weight  # before the next slice is made


def _new(x: torch.Tensor, numbers: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], numbers.shape[-2]))


def _define(name: str, into: Callable[..., torch.Tensor]) -> None:
    """Give torch an op, with a form that makes its result and one that writes into ``out``."""

    def make(x: torch.Tensor, numbers: torch.Tensor, *others: Any) -> torch.Tensor:
        return into(x, numbers, *others, out=_new(x, numbers))

    _LIBRARY.define(f"{name}({_ARGUMENTS[name]}) -> Tensor")
    _LIBRARY.define(f"{name}.out({_ARGUMENTS[name]}, *, Tensor(a!) out) -> Tensor(a!)")
    _LIBRARY.impl(name, make, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"{name}.out", into, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ds_finepage::{name}", _new)


_define("packed_linear", _into)
_define("packed_grouped_linear", _grouped_into)

packed_linear = torch.ops.ds_finepage.packed_linear
packed_grouped_linear = torch.ops.ds_finepage.packed_grouped_linear
