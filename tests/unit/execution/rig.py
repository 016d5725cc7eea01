"""An executor with an arena of its own, on the CPU or another device, and graphs to run on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_finepage.checker.checker import check
from ds_finepage.execution.arena import Arena, HostPool, byte_view
from ds_finepage.execution.bound_plan import BoundPlan
from ds_finepage.execution.collectives import RankParts
from ds_finepage.execution.executor import Executor, Residents
from ds_finepage.execution.lanes import make_lanes
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.taskgraph import TO_HOST, TaskGraph
from ds_finepage.planning.liveness import ample_arena_bytes
from tests.unit.execution.graphs import ACTIVATION, HOST, INPUT, OUTPUT, WEIGHT, Draft
from tests.unit.planning.steady import plan_steady

CPU = torch.device("cpu")
N = 8


class Rig:
    """An executor with all that it needs; arena and residency last from pass to pass."""

    def __init__(
        self,
        graph: TaskGraph | MemGraph,
        weights: dict[str, torch.Tensor] | None = None,
        *,
        arena_bytes: int | None = None,
        policy: str = "finepage",
        delay_seed: int | None = None,
        masters: dict[str, torch.Tensor] | None = None,
        in_place: frozenset[int] | None = None,
        device: torch.device = CPU,
        lanes: Any = None,
        poison: bool = False,
        parts: RankParts | None = None,
        **others: Any,
    ) -> None:
        if isinstance(graph, MemGraph):  # planned already
            self.memgraph, arena_bytes, graph = graph, graph.arena_bytes, graph.graph
        else:
            arena_bytes = ample_arena_bytes(graph, 64) if arena_bytes is None else arena_bytes
            self.memgraph = check(plan_steady(graph, arena_bytes=arena_bytes, policy=policy))
        if masters is None:
            copy = torch.Tensor.clone if device == CPU else torch.Tensor.pin_memory
            masters = {name: byte_view(copy(w)) for name, w in (weights or {}).items()}
        self.arena = Arena(arena_bytes, device)
        self.arena.bytes.fill_(0xFF)
        pool = HostPool(pinned=device != CPU)
        pool.reserve(self.memgraph.host_bytes)
        self.lanes = lanes or make_lanes(CPU, delay_seed=delay_seed, max_delay_us=50)
        self.residents = Residents()
        bound = BoundPlan(
            self.memgraph,
            arena=self.arena,
            pool=pool,
            masters=masters,
            in_place=frozenset(range(len(graph.tasks))) if in_place is None else in_place,
            poison=poison,
            parts=parts,
        )
        self.executor = Executor(bound, lanes=self.lanes, **others)

    def __call__(self, *args: Any, host: Sequence[Any] = ()) -> Any:
        return self.executor.run(args, host, self.residents)


def deep(depth: int = 6) -> tuple[TaskGraph, dict[str, torch.Tensor]]:
    """A stack of products whose first result is needed again at the very end."""
    draft = Draft()
    x = h = draft.tensor(INPUT, N, N)
    weights = {}
    first = None
    for i in range(depth):
        name = f"w{i}"
        weights[name] = torch.randn(N, N) / 3
        w = draft.tensor(WEIGHT, N, N, name=name)
        y = draft.tensor(ACTIVATION, N, N)
        draft.task("aten.mm.default", h, w, out=(y,))
        draft.task("aten.tanh_.default", y, out=(y,), changes=(y,))
        h, first = y, first or y
    out = draft.tensor(OUTPUT, N, N)
    assert first is not None
    draft.task("aten.add.Tensor", h, first, out=(out,))
    return draft.graph((x,), (out,)), weights


def deep_in_eager(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    made = []
    for w in weights.values():
        made.append(torch.tanh((made[-1] if made else x) @ w))
    return made[-1] + made[0]


def negated() -> TaskGraph:
    draft = Draft()
    x, y = draft.tensor(INPUT, 3), draft.tensor(OUTPUT, 3)
    draft.task("aten.neg.default", x, out=(y,))
    return draft.graph((x,), (y,))


def copied_to_host() -> TaskGraph:
    """Negate an argument, copy that to host memory, and work on it in the least memory."""
    draft = Draft()
    x, out = draft.tensor(INPUT, N, N), draft.tensor(OUTPUT, N, N)
    a, b, c = (draft.tensor(ACTIVATION, N, N) for _ in range(3))
    rows = draft.tensor(HOST, N, N)
    draft.task("aten.neg.default", x, out=(a,))
    draft.task(TO_HOST, a, out=(rows,))
    for source, result in ((a, b), (b, c), (c, out)):
        draft.task("aten.tanh.default", source, out=(result,))
    return draft.graph((x,), (rows, out))


def thrice_tanh(x: torch.Tensor) -> torch.Tensor:
    return x.tanh().tanh().tanh()
