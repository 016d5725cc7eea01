"""Runs PyTorch's own samples of its ops by plan, under the least budget, and watches the arena."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_finepage.api import attach
from ds_finepage.config import DebugConfig
from ds_finepage.execution.lanes import Action, CpuLanes
from ds_finepage.execution.program import Program
from ds_finepage.graph.memgraph import MemGraph, Node, NodeKind
from ds_finepage.graph.profiles import load_profile
from ds_finepage.runtime import device_memory
from ds_finepage.runtime.attachment import weak_backend
from ds_finepage.runtime.handle import Handle

PROFILE = load_profile("t4")
LEAST_AMPLE_BYTES = 1 << 20
AMPLE_SHARE = 8
"""Ample is as many times the bytes of the tensors given and returned; arenas are copied a lot."""
WIDTH = 32
SEED = 5

PLANNED, FALLBACK = "planned", "fallback"


@dataclass
class Outcome:
    """What came of the samples of one op: how they ran, and what was wrong."""

    runs: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class Around(nn.Module):
    """Two products, so that there are weights to page around the op."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.last = nn.Parameter(torch.randn(WIDTH, WIDTH))


class WatchingLanes(CpuLanes):
    """Runs the steps of a pass one by one, and notes each that writes beyond its extents."""

    def __init__(self) -> None:
        super().__init__()
        self.handle: Handle | None = None
        self.faults: list[str] = []

    def run(self, program: Program, actions: dict[int, Action]) -> None:
        assert self.handle is not None and self.handle._memory._arena is not None
        arena = self.handle._memory._arena.bytes
        (found,) = self.handle._runner.table.passes
        assert found.memgraph is not None
        for step in program.merged:
            before = arena.clone()
            actions[step.node.id]()
            changed = arena != before
            for begin, end in may_write(found.memgraph, step.node):
                changed[begin:end] = False
            if num_bytes := int(changed.sum()):
                self.faults.append(f"{name_of(found.memgraph, step.node)}: {num_bytes} bytes")


def may_write(memgraph: MemGraph, node: Node) -> Iterator[tuple[int, int]]:
    """Go over the bytes of the arena, as [begin, end), that a node may write."""
    buffers = memgraph.graph.buffers
    if node.kind is NodeKind.COMPUTE:
        assert node.task is not None
        task, places = memgraph.graph.tasks[node.task], memgraph.placements[node.id]
        for buffer in {*task.writes, *task.touches} & places.keys():
            begin = places[buffer].offset
            yield begin, begin + buffers[buffer].nbytes
    elif node.extent is not None:  # reloads fill it; what is vacated is filled with NaN
        whole = node.kind in (NodeKind.DROP, NodeKind.OFFLOAD)
        assert whole or node.buffer is not None
        nbytes = node.extent.nbytes if whole else buffers[node.buffer or 0].nbytes
        yield node.extent.offset, node.extent.offset + nbytes


def name_of(memgraph: MemGraph, node: Node) -> str:
    return node.kind.name if node.task is None else memgraph.graph.tasks[node.task].op


def op_db() -> list[Any]:
    """Return PyTorch's list of ops, without the seeds that some set for themselves in each call."""
    from torch.testing._internal import common_methods_invocations as invocations

    invocations.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return list(invocations.op_db)


@contextmanager
def watched(model: nn.Module, ample_bytes: int) -> Iterator[tuple[Handle, WatchingLanes]]:
    """Attach to a model, with lanes that watch the arena."""
    lanes: list[WatchingLanes] = []

    def make_lanes(*_: Any, **__: Any) -> WatchingLanes:
        lanes.append(WatchingLanes())
        return lanes[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "make_lanes", make_lanes)
        debug = DebugConfig(poison_vacated=True)  # so that it does not step aside either
        handle = attach(
            model, device_budget=ample_bytes, device="cpu", profile=PROFILE, debug=debug
        )
        lanes[0].handle = handle
        try:
            yield handle, lanes[0]
        finally:
            handle.detach()


def flat_call(op: Callable[..., Any], sample: Any) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """Return a function of a sample's tensors alone, and the tensors.

    It copies them, so that what the op gets lies in the arena, and copies what the op returns, so
    that this lies there too.
    """
    leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(leaves)
        for i, tensor in zip(at, tensors, strict=True):
            given[i] = tensor.clone()
        first, args, kwargs = tree_unflatten(given, spec)
        found = tree_flatten(op(first, *args, **kwargs))[0]
        return tuple(t.clone() for t in found if isinstance(t, torch.Tensor))

    return call, [leaves[i].detach() for i in at]


def graph_of(call: Callable[..., Any], num_tensors: int, num_results: int) -> torch.fx.GraphModule:
    """Build what Dynamo would hand over: a product, the op, another product."""
    graph = torch.fx.Graph()
    x, first, last = (graph.placeholder(name) for name in ("x", "first", "last"))
    tensors = [graph.placeholder(f"t{i}") for i in range(num_tensors)]
    between = graph.call_function(torch.mm, (x, first))
    found = graph.call_function(call, tuple(tensors))
    results = [graph.call_function(operator.getitem, (found, i)) for i in range(num_results)]
    graph.output((*results, graph.call_function(torch.mm, (between, last))))
    return torch.fx.GraphModule(nn.Module(), graph)


def try_sample(op: Callable[..., Any], sample: Any, outcome: Outcome) -> None:
    """Run one sample by plan, twice, and note what came of it."""
    call, tensors = flat_call(op, sample)
    model, x = Around(), torch.randn(WIDTH, WIDTH)
    torch.manual_seed(SEED)
    with torch.no_grad():
        plain = (*call(*tensors), x @ model.first @ model.last)
    nbytes = sum(t.element_size() * t.numel() for t in (*tensors, *plain))
    ample_bytes = LEAST_AMPLE_BYTES + AMPLE_SHARE * nbytes
    with torch.no_grad(), watched(model, ample_bytes) as (handle, lanes):
        args = (x, model.first, model.last, *tensors)
        run = weak_backend(handle._calls)(graph_of(call, len(tensors), len(plain) - 1), args)
        for is_least in (False, True):
            if is_least:
                handle.replan(budget_bytes=handle.stats.min_budget_bytes)
            torch.manual_seed(SEED)  # random ops draw the same numbers
            found = ()  # results that are held need room
            found = run(*args)
            if len(found) != len(plain) or not all(map(same, found, plain)):
                outcome.faults.append("another result than in eager PyTorch")
            if handle.stats.num_unplanned_graphs:
                assert handle.stats.unplanned_reasons
                outcome.runs[FALLBACK] += 1
                return
        outcome.runs[PLANNED] += 1
        outcome.faults += lanes.faults


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are equal, NaN where the other has NaN."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if one.is_complex():
        one, other = (torch.view_as_real(t.resolve_conj()) for t in (one, other))
    is_equal = one == other
    if one.is_floating_point():
        is_equal |= one.isnan() & other.isnan()
    return bool(is_equal.all())
