"""Attention to rows of a KV cache in host memory: which tasks the host can compute.

A step copies the rows of a layer to the device, writes the new ones behind them, and attends to all
of them. The host has the same rows. It needs the queries and the new rows, which are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ds_finepage.graph.taskgraph import TO_HOST, Ref, Task, TaskGraph, TensorView

_STATES = ("query", "key", "value")
_OTHERS = {
    "flash_attention_for_cpu": ("dropout_p", "is_causal"),
    "flash_attention": ("dropout_p", "is_causal"),
    "efficient_attention": ("attn_mask", "compute_log_sumexp", "dropout_p", "is_causal"),
    "cudnn_attention": ("attn_mask", "compute_log_sumexp", "dropout_p", "is_causal"),
}
ATTENTIONS = {
    f"aten._scaled_dot_product_{name}.default": (*_STATES, *others)
    for name, others in _OTHERS.items()
}
"""The ops that torch chooses from, with the names of their first arguments."""

HOST_ATTENTION = "finepage.host_attention.default"
"""Its arguments: queries (batch, heads, new tokens, width); keys, and the new ones, (tokens, batch,
shared heads, width); values likewise; mask or None; the scale of the scores or None."""

DTYPES = ("float32", "bfloat16", "float16")
"""Of the rows, as the op numbers them."""

MOST_QUERIES = 16
"""The most queries of a head: those of one new token, or of a draft."""

ATTENTION_FLOPS = 6
"""Arithmetic of this op, over that of a plain product. Measured: 17e9 flops/s on a core with
AVX-512, whose plain products have about 100e9."""

SPANS, SPAN_TOKENS = 64, 256
"""The most spans of tokens of a sequence, and the fewest tokens of a span. One thread attends to a
span. So results depend on no number of threads."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention that the host can compute.

    Attributes:
        task: The task.
        rows: The buffers of keys and of values on the device; nothing else uses them.
        copied: The tasks that write rows there; nothing else needs them.
        args: Of the op that the host runs instead.
        nbytes: Bytes of keys and values.
    """

    task: int
    rows: tuple[int, int]
    copied: frozenset[int]
    args: tuple[Any, ...]
    nbytes: int


def attentions(graph: TaskGraph) -> list[Attention]:
    """Find the attention that the host can compute, in the order of the pass."""
    sent = {_place(_view(graph, t.args[0])): t for t in graph.tasks if t.op == TO_HOST}
    tasks = (task for task in graph.tasks if sent and task.op in ATTENTIONS)
    found = (_attention(graph, task, sent) for task in tasks)
    return [each for each in found if each is not None]


def _attention(graph: TaskGraph, task: Task, sent: Mapping[TensorView, Task]) -> Attention | None:
    named = {**dict(zip(ATTENTIONS[task.op], task.args, strict=False)), **dict(task.kwargs)}
    query, mask = _view(graph, named["query"]), named.get("attn_mask")
    others = {graph.tensors[result].buffer for result in task.results[1:] if result is not None}
    if named.get("dropout_p") or named.get("is_causal"):
        return None
    if query.dtype not in DTYPES or query.shape[2] > MOST_QUERIES:
        return None
    if mask is not None and _view(graph, mask).shape[1] != 1 and _view(graph, mask).stride[1]:
        return None  # each head has its own
    if any(graph.uses[buffer] != (task.index,) for buffer in others):
        return None
    keys, values = (_rows(graph, task, named[name], sent) for name in ("key", "value"))
    if keys is None or values is None or query.shape[1] % keys.num_heads:
        return None
    return Attention(
        task=task.index,
        rows=(keys.buffer, values.buffer),
        copied=frozenset({keys.writer, values.writer}),
        args=(named["query"], *keys.args, *values.args, mask, named.get("scale")),
        nbytes=sum(graph.buffers[rows.buffer].nbytes for rows in (keys, values)),
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Keys or values: their buffer on the device, and the old and the new ones in host memory."""

    buffer: int
    num_heads: int
    writer: int
    args: tuple[Ref, Ref]


def _rows(
    graph: TaskGraph, user: Task, given: Ref, sent: Mapping[TensorView, Task]
) -> _Rows | None:
    """Return the rows that a task reads, if they are all that is in a buffer of the KV cache."""
    view = _view(graph, given)
    buffer = graph.buffers[view.buffer]
    writer, *readers = graph.uses[buffer.id]
    copy = graph.tasks[writer]
    if not graph.is_handed(buffer) or readers != [user.index] or copy.op != "aten.copy_.default":
        return None
    assert buffer.gather is not None
    sending = sent.get(_place(_view(graph, copy.args[1])))
    batch, heads, tokens, width = view.shape
    if sending is None or sending.results[0] is None:
        return None
    old, new = graph.tensors[buffer.gather], graph.tensors[sending.results[0]]
    is_whole = (
        view.offset == 0
        and view.stride == (heads * width, width, batch * heads * width, 1)
        and old.shape[1:] == new.shape[1:] == (batch, heads, width)
        and tokens == old.shape[0] + new.shape[0]
    )
    if not is_whole:
        return None
    return _Rows(buffer.id, heads, writer, (Ref(old.id), Ref(new.id)))


def _view(graph: TaskGraph, value: Any) -> TensorView:
    assert isinstance(value, Ref)
    return graph.tensors[value.tensor]


def _place(view: TensorView) -> TensorView:
    """Return a view as all tensors at this place have it."""
    return replace(view, id=0)
