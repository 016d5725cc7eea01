"""The op that multiplies by a packed weight, as the planner knows it.

It computes ``SLICE_ROWS`` output features at a time, each slice as a product of its own, so a plan
may cut it between two slices and change no bit.
"""

from __future__ import annotations

PACKED_LINEAR = "ds_finepage.packed_linear.default"
"""Its arguments: rows, numbers, scales, minima, bias or None, bits of a number, size of a group."""

SLICE_ROWS = 256
"""Output features that it unpacks together; the same as in ``packing/op.py``."""
