"""The forms of weights, and the ops that multiply by packed ones, as all parts know them.

An op makes its output features a slice at a time, each as a product of its own, so a plan may cut
it between two slices and change no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNPACKED = "bf16"
"""Names weights of 16 bits: bfloat16, or float16 on a card that has none."""

FORM_BITS = {"int8": 8, "int4": 4}
"""Name of a packed form -> the bits of a number."""

WITH_OUTPUT = "+output"
"""Ends the name of a form in which the output layer is packed too, as in ``int4+output``."""

PACKED_FORMS = (*FORM_BITS, *(name + WITH_OUTPUT for name in FORM_BITS))
"""The names of all packed forms."""

GROUP = 64
"""Weights in a row that share a scale and a minimum, if the user does not say."""

PACKED_LINEAR = "ds_finepage.packed_linear.default"
"""Its arguments: rows, numbers, scales, minima, bias or None, bits of a number, size of a group,
and whether the product is fused (see :func:`wants_fused`)."""

PACKED_GROUPED = "ds_finepage.packed_grouped_linear.default"
"""A product with one packed matrix an expert. Its arguments: rows that are sorted by expert,
numbers, scales, minima, the end of each expert's rows, bits of a number, size of a group, and
whether the product is fused."""

PACKED_PRODUCTS = frozenset({PACKED_LINEAR, PACKED_GROUPED})
"""The ops that unpack a weight; their second to fourth arguments are its parts."""

SLICED_LINEAR = "ds_finepage.sliced_linear.default"
"""A product with a matrix that is not packed, a slice of rows at a time. Its arguments: rows, the
matrix as (out, in), bias or None."""

OUTPUT_ROWS = 2048
"""Output features that a sliced product multiplies together: many, for each one is a kernel."""

SLICE_ROWS = 256
"""Output features, which are rows of the weight, that a CPU unpacks and multiplies together."""

CUT_ROWS = 2 * SLICE_ROWS
"""Those that an accelerator multiplies together. Plans cut between them."""

FUSED_ROWS = 16
"""The most rows of activations that a fused product takes: those of a decode step."""

FEW_ROWS = 8
"""The most rows of activations for which a CPU unpacks in registers, where it has a C compiler."""

_FUSED = 7


def wants_fused(arguments: Sequence[Any]) -> bool:
    """Tell whether a packed product is to be fused: to unpack in registers, and not into memory.

    It is fused then for at most ``FUSED_ROWS`` rows, on an accelerator that can.

    Args:
        arguments: Of the op; the last one may be missing.
    """
    return len(arguments) > _FUSED and bool(arguments[_FUSED])
