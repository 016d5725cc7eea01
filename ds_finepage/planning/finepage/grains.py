"""Chooses few large pieces of the weights to stream, instead of a small piece of each.

A piece costs a copy, and a task more where it is cut off, whatever its size. If little has to be
streamed, or weights are small, the same share of every weight makes pieces that take longer to
start than to copy. So a weight streams at least a *grain*, or nothing. The pieces are spread evenly
over the time of the pass.
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
    *,
    pace: Mapping[int, int] | None = None,
    keeps_small: bool = False,
) -> dict[int, int]:
    """Choose bytes to stream of some weights: of each at least a grain, or all of it, or nothing.

    Args:
        weights: The weights, by use.
        sizes: Weight -> bytes.
        divisible: The weights that can be cut. The others stream whole or not at all.
        missing: Least bytes to stream; all weights stream if they have fewer.
        grain_bytes: Size of the grain.
        pace: Weight -> its part of the pass, in any unit; None: in proportion to its bytes.
        keeps_small: Do not stream weights smaller than the grain, if the others have enough bytes.

    Returns:
        Weight -> bytes to stream, whole rows.
    """
    chosen = set(weights)
    large = {b for b in weights if sizes[b] >= grain_bytes}
    if keeps_small and sum(sizes[b] for b in large) >= missing:
        chosen = large
    pace = sizes if pace is None else pace
    total = max(1, sum(pace[b] for b in weights))
    streamed = dict.fromkeys(weights, 0)
    goal = max(0, missing)
    if chosen.isdisjoint(divisible):  # whole weights: the last one is due at the end of the pass
        goal = -(-goal // grain_bytes) * grain_bytes
    due = 0  # bytes still to be streamed, in units of 1/total
    for buffer in weights:
        due += pace[buffer] * goal
        wanted = due // total
        if buffer not in chosen:
            continue
        if wanted >= sizes[buffer]:
            streamed[buffer] = sizes[buffer]
        elif buffer in divisible:
            streamed[buffer] = _in_grains(divisible[buffer], wanted, grain_bytes)
        due -= streamed[buffer] * total
    rest = missing - sum(streamed.values())
    # The rest is less than a grain.
    for buffer in sorted(reversed(weights), key=lambda b: b not in chosen):
        if rest <= 0:
            break
        before = streamed[buffer]
        if buffer in divisible:
            streamed[buffer] = _rows_bytes(divisible[buffer], before + rest)
        else:
            streamed[buffer] = sizes[buffer]
        rest -= streamed[buffer] - before
    return streamed


def _in_grains(weight: Divisible, wanted: int, grain_bytes: int) -> int:
    """Return the bytes of as many grains of whole rows as are wanted."""
    unit_bytes = quantum(weight) * weight.row_bytes
    grain_bytes = max(1, grain_bytes // unit_bytes) * unit_bytes
    return _rows_bytes(weight, wanted // grain_bytes * grain_bytes)


def _rows_bytes(weight: Divisible, wanted: int) -> int:
    """Return the bytes of rows, at least those that are wanted, beside which whole quanta stay."""
    if wanted <= 0:
        return 0
    kept = max(0, weight.num_rows - -(-wanted // weight.row_bytes))
    return (weight.num_rows - kept // quantum(weight) * quantum(weight)) * weight.row_bytes
