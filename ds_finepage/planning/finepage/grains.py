"""Chooses few large pieces of the weights to stream, instead of a small piece of each.

A piece costs a copy, and a task more where it is cut off, whatever its size. If little has to be
streamed, or weights are small, the same share of every weight makes pieces that take longer to
start than to copy. So a weight streams at least a *grain*, or nothing. The pieces are spread evenly
over the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ds_finepage.planning.rewrite.split import Divisible, quantum


def stream_in_grains(
    weights: Sequence[int],
    sizes: Mapping[int, int],
    divisible: Mapping[int, Divisible],
    missing: int,
    grain_bytes: int,
) -> dict[int, int]:
    """Choose bytes to stream of some weights: of each at least a grain, or all of it, or nothing.

    Args:
        weights: The weights, by use.
        sizes: Weight -> bytes.
        divisible: The weights that can be cut. The others stream whole or not at all.
        missing: Least bytes to stream; all weights stream if they have fewer.
        grain_bytes: Size of the grain.

    Returns:
        Weight -> bytes to stream, whole rows.
    """
    total = max(1, sum(sizes[b] for b in weights))
    streamed = dict.fromkeys(weights, 0)
    due = 0  # bytes still to be streamed, in units of 1/total
    for buffer in weights:
        due += sizes[buffer] * max(0, missing)
        wanted = due // total
        if wanted >= min(grain_bytes, sizes[buffer]) and buffer in divisible:
            streamed[buffer] = _rows_bytes(divisible[buffer], wanted)
        elif wanted >= sizes[buffer]:
            streamed[buffer] = sizes[buffer]
        due -= streamed[buffer] * total
    rest = missing - sum(streamed.values())
    for buffer in reversed(weights):  # what is left is less than a grain
        if rest <= 0:
            break
        before = streamed[buffer]
        if buffer in divisible:
            streamed[buffer] = _rows_bytes(divisible[buffer], before + rest)
        else:
            streamed[buffer] = sizes[buffer]
        rest -= streamed[buffer] - before
    return streamed


def _rows_bytes(weight: Divisible, wanted: int) -> int:
    """Return the bytes of whole quanta of rows, at least those that are wanted."""
    rows = quantum(weight)
    num_rows = -(-wanted // (rows * weight.row_bytes)) * rows
    return min(weight.num_rows, num_rows) * weight.row_bytes
