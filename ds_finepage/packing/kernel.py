"""The Triton kernel of the fused products; only :mod:`ds_finepage.packing.fused` imports it.

[Note: a fused product]
A program makes the outputs of some rows of the weight. It goes along these rows, reads packed bytes
with their scales and minima once, unpacks them in registers to the same 16-bit numbers as
:func:`ds_finepage.packing.form.unpack`, and adds their products in float32. Nothing is unpacked
into memory.

Each output is a sum of its own, in an order that follows from the width of the weight alone. The
number of rows is an ordinary argument, which Triton does not compile for, and so is how activations
and results are aligned. Packed numbers are always aligned, in a plan and by torch. So a cut weight
gives the same bits as a whole one, because one compiled kernel serves both.

One row of activations is multiplied element by element. Several are a matrix product, ``SEVERAL``
columns wide, because that many matrix units take.

[Note: arguments of the kernel]
``x`` points to the activations, (``num_rows``, in), and ``out`` to the result, (``num_rows``,
``num_out``), whose rows begin ``step`` elements apart. ``numbers``, ``scales`` and ``minima`` are
those of the packed weight; matrices of experts lie one behind the other. ``bias`` and ``ends`` are
looked at if ``HAS_BIAS``, and if ``NUM_EXPERTS`` is not 0; ``EXPERTS`` is the power of 2 that is
not below it. A number has ``BITS`` bits, and a row of the weight ``GROUPS`` groups of ``GROUP``
weights. With ``ALONE`` a program multiplies one row of activations, else all of them. It makes
``OUTPUTS`` outputs, and reads ``RUNS`` runs of ``RUN`` bytes of each row of the weight at a time. A
run lies in one group.
"""

from __future__ import annotations

import triton
import triton.language as tl

SEVERAL = tl.constexpr(16)
"""Rows of activations in a product of several; those that are missing count as 0."""


@triton.jit
def _added(
    total,
    numbers,
    scale,
    minimum,
    x,
    columns,
    is_column,
    row,
    num_rows,
    WIDTH: tl.constexpr,
    ALONE: tl.constexpr,
):
    """Add the products with some numbers of each row of the weight.

    Args:
        total: Sums so far, in float32: (outputs, numbers) for one row, (outputs, ``SEVERAL``) else.
        numbers: (outputs, groups, numbers of a group), integers.
        scale: (outputs, groups), float32.
        minimum: Likewise.
        x: Points to the activations, (rows, ``WIDTH``).
        columns: Place of each number in a row of the weight, (groups, numbers of a group).
        is_column: Where there is such a place.
        row: The first row of activations.
        num_rows: Of the activations.
        WIDTH: Numbers in a row of the weight.
        ALONE: There is one row of activations.
    """
    wide = numbers.to(tl.float32) * scale[:, :, None] + minimum[:, :, None]
    AT_ONCE: tl.constexpr = columns.shape[0] * columns.shape[1]
    weight = tl.reshape(wide.to(x.dtype.element_ty), [wide.shape[0], AT_ONCE])
    columns = tl.reshape(columns, [AT_ONCE])
    is_column = tl.reshape(is_column, [AT_ONCE])
    if ALONE:
        given = tl.load(x + row.to(tl.int64) * WIDTH + columns, mask=is_column, other=0.0)
        total += weight.to(tl.float32) * given.to(tl.float32)[None, :]
    else:
        rows = row + tl.arange(0, SEVERAL)
        at = rows.to(tl.int64)[None, :] * WIDTH + columns[:, None]
        is_there = is_column[:, None] & (rows < num_rows)[None, :]
        given = tl.load(x + at, mask=is_there, other=0.0)
        total = tl.dot(weight, given, total, input_precision="ieee")
    return total


@triton.jit
def _sums(
    x,
    numbers,
    scales,
    minima,
    lines,
    is_line,
    row,
    num_rows,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    ALONE: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Return the sums of :func:`_added` over the whole width of some rows of the weight."""
    GROUP_BYTES: tl.constexpr = GROUP * BITS // 8
    RUNS_OF_GROUP: tl.constexpr = (GROUP_BYTES + RUN - 1) // RUN
    NUM_RUNS: tl.constexpr = GROUPS * RUNS_OF_GROUP
    WIDTH: tl.constexpr = GROUP * GROUPS
    SUMS: tl.constexpr = RUNS * RUN if ALONE else SEVERAL
    total = tl.zeros([lines.shape[0], SUMS], dtype=tl.float32)
    for first in range(0, NUM_RUNS, RUNS):
        runs = first + tl.arange(0, RUNS)
        groups = runs // RUNS_OF_GROUP
        inner = (runs % RUNS_OF_GROUP)[:, None] * RUN + tl.arange(0, RUN)[None, :]
        is_in = (runs < NUM_RUNS)[:, None] & (inner < GROUP_BYTES)
        at = lines[:, None] * GROUPS + groups[None, :]
        is_there = is_line[:, None] & (runs < NUM_RUNS)[None, :]
        scale = tl.load(scales + at, mask=is_there, other=0.0).to(tl.float32)
        least = tl.load(minima + at, mask=is_there, other=0.0).to(tl.float32)
        is_byte = is_line[:, None, None] & is_in[None, :, :]
        places = at[:, :, None] * GROUP_BYTES + inner[None, :, :]
        taken = tl.load(numbers + places, mask=is_byte, other=0)
        column = groups[:, None] * GROUP + inner
        low = taken & 15 if BITS == 4 else taken
        total = _added(total, low, scale, least, x, column, is_in, row, num_rows, WIDTH, ALONE)
        if BITS == 4:
            high, column = taken >> 4, column + GROUP_BYTES
            total = _added(total, high, scale, least, x, column, is_in, row, num_rows, WIDTH, ALONE)
    return total


@triton.jit(
    do_not_specialize=["num_out", "num_rows", "step"],
    do_not_specialize_on_alignment=["x", "scales", "minima", "bias", "ends", "out"],
)
def product(
    x,
    numbers,
    scales,
    minima,
    bias,
    ends,
    out,
    num_out,
    num_rows,
    step,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALONE: tl.constexpr,
    OUTPUTS: tl.constexpr,
    RUNS: tl.constexpr,
    RUN: tl.constexpr,
):
    """Write ``x @ weight.T + bias``; see [Note: arguments of the kernel]."""
    row = tl.program_id(1)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_out = outputs < num_out
    lines = outputs.to(tl.int64)
    if NUM_EXPERTS > 0:
        places = tl.arange(0, EXPERTS)
        behind = tl.load(ends + places, mask=places < NUM_EXPERTS, other=row + 1) <= row
        expert = tl.sum(behind.to(tl.int32), 0)
        lines += tl.minimum(expert, NUM_EXPERTS - 1).to(tl.int64) * num_out
    sums = _sums(
        x,
        numbers,
        scales,
        minima,
        lines,
        is_out,
        row,
        num_rows,
        BITS,
        GROUP,
        GROUPS,
        ALONE,
        RUNS,
        RUN,
    )
    if ALONE:
        sums = tl.sum(sums, 1)[:, None]
        rows = row + tl.arange(0, 1)
    else:
        rows = row + tl.arange(0, SEVERAL)
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=is_out, other=0.0).to(tl.float32)[:, None]
    if NUM_EXPERTS > 0:
        sums = tl.where(expert < NUM_EXPERTS, sums, 0.0)
    place = out + rows.to(tl.int64)[None, :] * step + outputs[:, None]
    is_there = is_out[:, None] & (rows < num_rows)[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=is_there)
