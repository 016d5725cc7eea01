"""The bytes of a budget, and the device bytes that it pays for outside the arena."""

from __future__ import annotations

from math import prod

from ds_finepage.config import BudgetKind, DeviceBudget
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.units import align_up

HOST_PROGRAM_SLACK_BYTES = 64 * 1024

AUTO_MARGIN_BYTES = 512 << 20
"""Bytes that a budget of "auto" leaves to driver and libraries on such a machine."""

SELECTED_PARTS = 4
"""Beam search puts the rows of a KV cache with room into another order in so many parts."""


SMALL_SHARE, LARGE_SHARE, FULL_SHARE = 64, 8, 2
"""A KV cache of at most one part in 64 of the budget is small, and one of an eighth is large. One
of a half leaves too little for anything else."""


def is_small(kv_bytes: int, budget_bytes: int, *, share: int = SMALL_SHARE) -> bool:
    """Tell whether a KV cache is on the device, with room for all its rows from the start.

    Weights lose a small part of the budget, and nothing is planned when the cache grows.

    Args:
        kv_bytes: Bytes of the cache at its longest.
        budget_bytes: The bytes that it and the weights may take.
        share: The cache is small up to one part in so many of them.
    """
    return kv_bytes * share <= budget_bytes


def competes(
    kv_bytes: int, weight_bytes: int, budget_bytes: int, *, share: int = LARGE_SHARE
) -> bool:
    """Tell whether a large KV cache should compete with weights for the arena, layer by layer.

    Its rows are in host memory then, and copies of some layers are kept. If they are on the device
    instead, weights have what they leave, and all of them move where that is too little. Where all
    weights fit beside the cache, nothing has to move.

    Args:
        kv_bytes: Bytes of the cache at its longest.
        weight_bytes: Bytes of all weights.
        budget_bytes: The bytes that both may take.
        share: The cache competes from one part in so many of them on.
    """
    return kv_bytes * share >= budget_bytes and kv_bytes + weight_bytes > budget_bytes


def non_arena_bytes(graph: TaskGraph, alignment: int) -> int:
    """Return the device bytes that a pass needs outside the arena.

    These are its inputs, outputs, KV cache and constants, the largest op workspace, and the tensors
    that the calling program makes from them. ``generate`` makes a few copies of token ids and masks
    (inputs of integers or booleans), and one row of logits in float32 with two copies; the meter in
    the tests holds it to that. Beam search needs :func:`selected_bytes` more.
    """
    external = callers = row = 0
    returned = {graph.tensors[o.tensor] for o in graph.outputs if o.tensor is not None}
    counted = {t.buffer for t in graph.tensors if t.dtype in ("bool", "int32", "int64")}
    for buffer in graph.buffers:
        if not (buffer.kind.is_paged or buffer.kind.is_on_host):
            external += align_up(buffer.nbytes, alignment)
        if buffer.kind is BufferKind.INPUT and buffer.id in counted:
            callers += buffer.nbytes
    for view in returned:
        if graph.buffers[view.buffer].kind is BufferKind.HOST:
            continue  # rows of a KV cache, which the caller keeps in host memory
        if len(view.shape) >= 2 and view.shape[-2]:
            row = max(row, 4 * prod(view.shape) // view.shape[-2])
    return external + graph.workspace_bytes + 4 * callers + 3 * row + HOST_PROGRAM_SLACK_BYTES


def selected_bytes(graph: TaskGraph) -> int:
    """Return the bytes that beam search needs to put the rows of a KV cache into another order.

    It copies the keys or the values of one layer at a time: those with room behind them in parts,
    and others at once. The rows that a pass replaces are gone by then.
    """
    found: dict[BufferKind, list[int]] = {kind: [] for kind in BufferKind}
    for tensor in (*(i.tensor for i in graph.inputs), *(o.tensor for o in graph.outputs)):
        view = None if tensor is None else graph.tensors[tensor]
        if view is not None and len(view.shape) == 4:  # (batch, heads, tokens, width)
            buffer = graph.buffers[view.buffer]
            found[buffer.kind].append(buffer.nbytes)
    given, made = found[BufferKind.INPUT], found[BufferKind.OUTPUT]
    whole = max(made) - sum(given) if made else max(given, default=0)
    return max(whole, -(-max(found[BufferKind.STATE], default=0) // SELECTED_PARTS))


def budget_on(device_budget: DeviceBudget, weight_bytes: int, profile: HardwareProfile) -> int:
    """Turn a budget into bytes on a machine that is known by its profile only.

    A share of the weights may exceed the device; the plan is then one for a larger device.

    Args:
        device_budget: The budget, as a ds_config has it.
        weight_bytes: Bytes of all weights.
        profile: The machine.

    Raises:
        ConfigError: Another budget is larger than the device, or nothing is left of it.
    """
    device = profile.capacity_bytes
    if device_budget.kind is BudgetKind.WEIGHTS:
        device = max(device, int(device_budget.amount * weight_bytes))
    return device_budget.resolve(
        weight_bytes=weight_bytes,
        device_bytes=device,
        free_bytes=device,
        margin_bytes=AUTO_MARGIN_BYTES,
        name="--device-budget",
    )
