"""The ops that multiply by packed weights.

Each is one op to torch, so one task of a plan. A CPU unpacks in registers where few rows are
multiplied (``native.py``). Else it unpacks ``SLICE_ROWS`` rows of a weight at a time and multiplies
by them, so that they stay in its caches. An accelerator unpacks as many as
``SCRATCH_BYTES`` hold, because each kernel has to be started.

[Note: slices are products of their own]
Products begin at fixed rows: multiples of ``SLICE_ROWS`` on a CPU, of ``CUT_ROWS`` on an
accelerator, however much is unpacked at a time. Plans cut at multiples of both. So the outputs of a
slice are the same bits, whether other slices are computed with it or not. One product over all of
them would be faster, but its last bits may differ: they did on a CPU in bfloat16, for a matrix of
4096 x 11008.

With ``fused``, few rows are multiplied without unpacking into memory, where Triton compiles for the
device; see [Note: a fused product] in ``kernel.py``.

[Note: who knows which experts have rows]
Experts without rows are not unpacked. On a CPU the op looks where the rows of each end. On an
accelerator the host would wait for that. So with few rows each row takes its expert by an index on
the device. The host waits only if rows are as many as experts, or too many for the scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

import torch

from ds_finepage.graph.packed import CUT_ROWS, FUSED_ROWS, SLICE_ROWS
from ds_finepage.packing import native
from ds_finepage.packing.form import WIDE_ROWS, Packed, PackedForm, unpack
from ds_finepage.packing.fused import fused_product, why_not

_LIBRARY = torch.library.Library("ds_finepage", "DEF")

SCRATCH_BYTES = 32 << 20
"""Bytes that an accelerator unpacks at a time; where ``CUT_ROWS`` rows need more, it takes those.
A weight of 4096 x 4096 in 16 bits has as many. Each piece takes three kernels to unpack."""


def workspace_bytes(
    numbers: Sequence[int],
    scales: Sequence[int],
    *,
    group: int,
    itemsize: int,
    num_given: int,
    on_accelerator: bool,
    fused: bool = False,
) -> int:
    """Return the bytes that an op takes for itself: the most that is unpacked at a time.

    On a CPU it takes fewer in some forms, and for few rows.

    Args:
        numbers: Shape of the numbers, of one matrix or of several.
        scales: Shape of the scales.
        group: Weights that share a scale.
        itemsize: Bytes of an unpacked weight.
        num_given: Rows that are multiplied by the weight.
        on_accelerator: The device is no CPU.
        fused: The op is asked for a fused product, and the accelerator can run it.
    """
    if fused and on_accelerator and num_given <= FUSED_ROWS:
        return 0
    width = scales[-1] * group
    if on_accelerator:
        row_bytes, packed_bytes, at_once = width * itemsize, 0, 1
        if len(numbers) == 3 and _takes_by_index(num_given, numbers[0], row_bytes):
            packed_bytes, at_once = numbers[-1] + 2 * scales[-1] * itemsize, num_given
        num_rows = min(_rows_at_once(at_once * row_bytes), numbers[-2])
        return at_once * num_rows * (row_bytes + packed_bytes)
    num_rows = min(SLICE_ROWS, numbers[-2])
    halves = 0 if numbers[-1] == width else numbers[-1]  # numbers of 4 bits are taken apart first
    wide = width * torch.float32.itemsize if itemsize < torch.float32.itemsize else 0
    beside = max(num_rows * halves, min(WIDE_ROWS, num_rows) * (wide + max(halves, wide // group)))
    return num_rows * width * itemsize + beside


def _rows_at_once(row_bytes: int) -> int:
    """Return how many rows an accelerator unpacks at a time."""
    return max(1, SCRATCH_BYTES // (row_bytes * CUT_ROWS)) * CUT_ROWS


def _takes_by_index(num_given: int, num_matrices: int, row_bytes: int) -> bool:
    """Tell whether on an accelerator each row takes its matrix by an index.

    It depends on nothing that cutting a weight changes.
    """
    return num_given < num_matrices and num_given * CUT_ROWS * row_bytes <= SCRATCH_BYTES


@torch.no_grad()
def _into(
    x: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor,
    bias: torch.Tensor | None,
    bits: int,
    group: int,
    fused: bool = False,
    *,
    out: torch.Tensor,
) -> torch.Tensor:
    """Write ``x @ weight.T + bias`` into ``out``, or into the columns of a cut weight in it.

    The other arguments are those of ``PACKED_LINEAR``.
    """
    rows, results = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    packed = Packed(numbers, scales, minima)
    multiply = fused_product if fused and _may_fuse(rows) else _multiply
    multiply(rows, packed, bias, PackedForm(bits, group), results)
    return out


@torch.no_grad()
def grouped_into(
    x: torch.Tensor,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor,
    ends: torch.Tensor,
    bits: int,
    group: int,
    fused: bool = False,
    *,
    out: torch.Tensor,
    read_ends: Callable[[], list[int]] | None = None,
) -> torch.Tensor:
    """Write the product of each row with the matrix of its expert into a tensor.

    Rows behind the last end become 0. ``read_ends`` returns the ends on the host, where a caller
    has read them before. The other arguments are those of ``PACKED_GROUPED``.
    """
    form, packed = PackedForm(bits, group), Packed(numbers, scales, minima)
    if fused and _may_fuse(x):
        fused_product(x, packed, None, form, out, ends)
        return out
    row_bytes = x.shape[-1] * x.element_size()
    if not x.is_cpu and _takes_by_index(len(x), len(numbers), row_bytes):
        _multiply_by_index(x, packed, ends, form, out)
        return out
    begin = 0
    for expert, end in enumerate(ends.tolist() if read_ends is None else read_ends()):
        if end > begin:
            matrix = Packed(*(part[expert] for part in packed))
            _multiply(x[begin:end], matrix, None, form, out[begin:end])
            begin = end
    out[begin:].zero_()
    return out


def _may_fuse(rows: torch.Tensor) -> bool:
    """Tell whether a product can be fused. It depends on nothing that cutting a weight changes."""
    return 0 < len(rows) <= FUSED_ROWS and why_not(rows.device) is None


def _multiply(
    rows: torch.Tensor,
    packed: Packed,
    bias: torch.Tensor | None,
    form: PackedForm,
    results: torch.Tensor,
) -> None:
    """Multiply rows by one packed matrix; see [Note: slices are products of their own]."""
    if native.takes(rows, packed):
        native.product(rows, packed, bias, form, results)
        return
    step = at_once = SLICE_ROWS
    if not rows.is_cpu:
        step, at_once = CUT_ROWS, _rows_at_once(rows.shape[1] * rows.element_size())
    for begin in range(0, packed.numbers.shape[0], at_once):
        span = slice(begin, begin + at_once)
        weight = unpack(Packed(*(part[span] for part in packed)), form, rows.dtype)
        products(rows, weight, None if bias is None else bias[span], results[:, span], step)
        del weight  # before the next one is made


def products(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    results: torch.Tensor,
    step: int,
) -> None:
    """Write ``rows @ weight.T + bias``, a slice at a time: each is a product of its own.

    Args:
        rows: (rows, in).
        weight: (out, in).
        bias: (out,), or none.
        results: (rows, out).
        step: Outputs of a slice.
    """
    biases = repeat(None) if bias is None else bias.split(step)
    slices = zip(weight.split(step), biases, results.split(step, dim=1), strict=False)
    for piece, its_bias, columns in slices:
        if its_bias is None:
            torch.mm(rows, piece.t(), out=columns)
        else:
            torch.addmm(its_bias, rows, piece.t(), out=columns)


def _multiply_by_index(
    rows: torch.Tensor,
    packed: Packed,
    ends: torch.Tensor,
    form: PackedForm,
    results: torch.Tensor,
) -> None:
    """Multiply each row by the matrix of its expert, without a look at the ends on the host."""
    places = torch.arange(len(rows), dtype=ends.dtype, device=ends.device)
    experts = torch.searchsorted(ends, places, right=True)
    is_behind = experts >= len(ends)
    experts.clamp_(max=len(ends) - 1)
    at_once = _rows_at_once(rows.numel() * rows.element_size())
    for begin in range(0, results.shape[1], at_once):
        span = slice(begin, begin + at_once)
        taken = (part[:, span].index_select(0, experts).flatten(0, 1) for part in packed)
        weight = unpack(Packed(*taken), form, rows.dtype).unflatten(0, (len(rows), -1))
        columns = results[:, span].split(CUT_ROWS, dim=1)
        for result, piece in zip(columns, weight.split(CUT_ROWS, dim=1), strict=True):
            torch.bmm(rows.unsqueeze(1), piece.transpose(1, 2), out=result.unsqueeze(1))
        del weight, piece  # before the next ones are made
    results.masked_fill_(is_behind.unsqueeze(1), 0)


def define(name: str, arguments: str, into: Callable[..., torch.Tensor]) -> Any:
    """Give torch an op, with a form that makes its result and one that writes into ``out``.

    Args:
        name: Of the op.
        arguments: By torch's schema: the input, the weight or its numbers, and others.
        into: Writes the result into a tensor.
    """

    def new(x: torch.Tensor, weight: torch.Tensor, *_: Any) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], weight.shape[-2]))

    def make(x: torch.Tensor, weight: torch.Tensor, *others: Any) -> torch.Tensor:
        return into(x, weight, *others, out=new(x, weight))

    _LIBRARY.define(f"{name}({arguments}) -> Tensor")
    _LIBRARY.define(f"{name}.out({arguments}, *, Tensor(a!) out) -> Tensor(a!)")
    _LIBRARY.impl(name, make, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"{name}.out", into, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ds_finepage::{name}", new)
    return getattr(torch.ops.ds_finepage, name)


_WEIGHT = "Tensor x, Tensor numbers, Tensor scales, Tensor minima"
_FORM = "int bits, int group, bool fused=False"

packed_linear = define("packed_linear", f"{_WEIGHT}, Tensor? bias, {_FORM}", _into)
packed_grouped_linear = define(
    "packed_grouped_linear", f"{_WEIGHT}, Tensor ends, {_FORM}", grouped_into
)
