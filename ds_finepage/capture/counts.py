"""Counts what an op computes and what it moves, from the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from ds_finepage.graph.packed import (
    FUSED_ROWS,
    PACKED_GROUPED,
    PACKED_PRODUCTS,
    SLICED_LINEAR,
    wants_fused,
)

ROW_READS = frozenset(
    {"aten.embedding", "aten.index_select", "aten.index", "aten.gather", "aten.take"}
)
"""Ops that read from their first argument as many elements as they return."""

ROW_WRITES = frozenset(
    {"aten.index_copy_", "aten.index_put_", "aten._index_put_impl_", "aten.scatter_"}
)
"""Ops that write into their first argument as many elements as their last tensor has."""

OVERWRITES = frozenset({"aten.copy_", "aten.fill_", "aten.zero_"})
"""Ops that write their first argument without reading it."""

UNFILLED = frozenset({"aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided"})
"""Ops that neither read nor write."""

GROUPED_MM = frozenset({"aten._grouped_mm", "transformers.grouped_mm_fallback"})
"""Products of each row with the one matrix of the second argument that its group has."""

PACKED_PACKETS = frozenset(op.removesuffix(".default") for op in PACKED_PRODUCTS)
"""Products of the first argument with a packed weight; the second holds its numbers."""

PACKED_GROUPED_PACKET = PACKED_GROUPED.removesuffix(".default")
"""The one whose weight has a matrix for each expert."""


def _count_cpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> int:
    """Count two products for each head of the query; a causal one does half of a square."""
    batch, heads, num_queries, width = query.shape
    num_keys = key.shape[-2]
    flops = 2 * batch * heads * num_queries * num_keys * (width + value.shape[-1])
    return flops // 2 if is_causal and num_queries == num_keys else flops


def _count_grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, *_: Any, **__: Any) -> int:
    return 2 * rows.shape[-2] * rows.shape[-1] * matrices.shape[-1]


def _count_packed(x: torch.Tensor, rows: torch.Tensor, *_: Any, **__: Any) -> int:
    """Count a product with a matrix that is packed, or made in slices, from its rows."""
    return 2 * x.numel() * rows.shape[-2]


FLOP_COUNTS: dict[str, Callable[..., int]] = {
    **{str(packet): count for packet, count in flop_registry.items()},
    "aten._scaled_dot_product_flash_attention_for_cpu": _count_cpu_attention,
    **dict.fromkeys(GROUPED_MM, _count_grouped_mm),
    **dict.fromkeys(PACKED_PACKETS, _count_packed),
    SLICED_LINEAR.removesuffix(".default"): _count_packed,
}
"""How to count an op's arithmetic, by the name of its overload packet."""


def moved_bytes(
    op: str, given: list[torch.Tensor], made: list[torch.Tensor], arguments: Sequence[Any] = ()
) -> int:
    """Count the bytes that an op reads and writes in device memory.

    An operand that the op changes in place is among its arguments and its results, so it counts
    twice. A table that is looked up, and a cache that gets new rows, count with those rows only.
    """
    if op in UNFILLED:
        return 0
    if op in ROW_READS:
        return sum(map(_bytes, given[1:])) + 2 * sum(map(_bytes, made))
    if op in ROW_WRITES:
        return sum(map(_bytes, given[1:])) + min(_bytes(given[0]), _bytes(given[-1]))
    if op in OVERWRITES:
        return sum(map(_bytes, given))
    used = 1
    if op in GROUPED_MM or op == PACKED_GROUPED_PACKET:
        matrices = given[1:4] if op == PACKED_GROUPED_PACKET else given[1:2]
        num = matrices[0].shape[0]
        used = min(given[0].shape[-2], num)  # no row needs more than one of them
        others = sum(map(_bytes, given)) - sum(map(_bytes, matrices))
        moved = others + sum(_bytes(m) * used // num for m in matrices) + sum(map(_bytes, made))
    else:
        distinct = {id(t): t for t in given}.values()
        moved = sum(map(_bytes, distinct)) + sum(map(_bytes, made))
    if op in PACKED_PACKETS:
        # Slices of the weight are unpacked into memory, scaled there, and read by the product.
        x, num_out = given[0], given[1].shape[-2]
        unpacked = 4 * used * num_out * x.shape[-1] * x.element_size()
        if wants_fused(arguments):
            # The number of rows may be a symbol, and this asks for no value of it.
            unpacked = torch.sym_ite(x.numel() <= FUSED_ROWS * x.shape[-1], 0 * unpacked, unpacked)
        moved += unpacked
    return moved


def _bytes(tensor: torch.Tensor) -> int:
    """Count the bytes of a view; a dimension that is expanded lies there once."""
    numel = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        numel *= size if stride or not size else 1
    return numel * tensor.element_size()
