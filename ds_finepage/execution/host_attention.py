"""Attention of few queries to rows of a KV cache in host memory, by a CPU.

torch's own kernels for a CPU read 0.3 to 1.4 GB/s of such rows in bfloat16 on two cores, because
they are made for many queries. This one reads 4 to 10.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ds_finepage.compiler import compiled, num_threads
from ds_finepage.graph.attention import DTYPES, SPAN_TOKENS, SPANS

SOURCE = Path(__file__).with_name("attention.c")


@torch.library.custom_op("finepage::host_attention", mutates_args=())
def host_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    new_keys: torch.Tensor,
    values: torch.Tensor,
    new_values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Return what ``scaled_dot_product_attention`` does, with heads that may share keys.

    Scores, weights and sums are in float32. Each result is the same with any number of threads.

    Args:
        query: (batch, heads, queries, width).
        keys: (tokens, batch, shared heads, width), dense.
        new_keys: Likewise, of the tokens behind them.
        values: Like ``keys``; their width may be another.
        new_values: Likewise.
        mask: For (batch, 1, queries, all tokens): true, or a number to add to the score; or None.
        scale: Of the scores; by default the root of 1 over the width.

    Returns:
        (batch, heads, queries, width of the values).
    """
    run = _compiled()
    assert not isinstance(run, str), "a plan with this op was made where C compiles"
    batch, heads, num_queries, width = query.shape
    shared, value_width = keys.shape[2], values.shape[3]
    num_tokens = len(keys) + len(new_keys)
    spans = min(SPANS, -(-num_tokens // SPAN_TOKENS))
    wide = query.float() * (width**-0.5 if scale is None else scale)
    wide = wide.reshape(batch, shared, -1, width).contiguous()
    parts = torch.empty(batch * spans, shared, wide.shape[2], value_width + 2)
    found = torch.empty(batch, heads, num_queries, value_width)
    added = None if mask is None else _added(mask, (batch, num_queries, num_tokens))
    rows = [tensor.contiguous() for tensor in (keys, new_keys, values, new_values)]
    run(
        *(tensor.data_ptr() for tensor in (*rows, wide)),
        *(None if added is None else added.data_ptr(), parts.data_ptr(), found.data_ptr()),
        *(len(keys), len(new_keys), batch, shared, wide.shape[2], num_queries, width, value_width),
        *(DTYPES.index(str(keys.dtype).removeprefix("torch.")), spans),
        num_threads(torch.get_num_threads()),
    )
    return found.to(query.dtype)


def why_not() -> str | None:
    """Say why this machine has no such attention; None if it has."""
    found = _compiled()
    return found if isinstance(found, str) else None


def _compiled() -> Callable[..., Any] | str:
    return compiled(SOURCE, "attention", pointers=8, longs=8, ints=3)


@host_attention.register_fake
def _(query: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return query.new_empty((*query.shape[:3], others[2].shape[3]))


def _added(mask: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return what a mask adds to the scores, (batch, queries, tokens)."""
    if mask.dtype is torch.bool:
        mask = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
    return mask.float().squeeze(1).expand(shape).contiguous()
