"""Transfers that follow one another are one copy, if that changes no order and no byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ds_finepage.execution import executor
from ds_finepage.execution.arena import Arena, byte_view
from ds_finepage.execution.bundles import MOST_BUNDLE_BYTES, Bundles, Transfer
from ds_finepage.execution.program import Program, lower
from ds_finepage.execution.spans import CpuSpanRecorder
from ds_finepage.graph.memgraph import Extent, Lane, MemGraph, NodeKind
from ds_finepage.graph.taskgraph import TaskGraph
from tests.unit.execution.graphs import ACTIVATION, INPUT, OUTPUT, WEIGHT, Draft
from tests.unit.execution.rig import Rig
from tests.unit.execution.test_program import (
    every_case,
    lowered,
    planned,
    reachable,
    required,
    steps,
)
from tests.unit.planning.sketches import sketch

NUM, ROWS = 4, 16


def next_of_all(memgraph: MemGraph) -> dict[int, int]:
    """Let every transfer be one with the next one of its lane, as far as the order allows it."""
    program = lower(memgraph)
    return {
        one.node.id: other.node.id
        for lane in (Lane.H2D, Lane.D2H)
        for one, other in zip(program.lanes[lane], program.lanes[lane][1:], strict=False)
    }


# --- the order -------------------------------------------------------------------------------


def test_two_reloads_that_nothing_comes_between_are_one_step() -> None:
    memgraph = planned(sketch("w1:64 w2:64", "w1 ->", "w2 ->"), 2)
    plain = steps(lower(memgraph), memgraph)
    assert plain["h2d"] == ["reload w1", "reload w2"]
    program = lower(memgraph, next_of=next_of_all(memgraph))
    found = steps(program, memgraph)
    assert found["h2d"] == ["reload w1"]
    assert found["compute"] == ["compute 0 <reload w1", "compute 1"]
    (step,) = program.lanes[Lane.H2D]
    assert [memgraph.graph.buffers[n.buffer or 0].name for n in step.bundled] == ["w2"]
    assert program.mean_transfer_bytes == lower(memgraph).mean_transfer_bytes == 64


def test_a_reload_that_waits_is_a_step_of_its_own() -> None:
    memgraph = planned(sketch("w1:64 w2:64", "w1 ->", "w2 ->"), 1)
    found = steps(lower(memgraph, next_of=next_of_all(memgraph)), memgraph)
    assert found["h2d"] == ["reload w1", "reload w2 <compute 0"]


def test_a_transfer_between_two_keeps_them_apart() -> None:
    memgraph = planned(sketch("w1:64 w2:64 w3:64", "w1 ->", "w2 ->", "w3 ->"), 3)
    one, _, three = (s.node.id for s in lower(memgraph).lanes[Lane.H2D])
    found = steps(lower(memgraph, next_of={one: three}), memgraph)
    assert found["h2d"] == ["reload w1", "reload w2", "reload w3"]


@every_case
def test_bundles_obey_every_edge(graph: TaskGraph, policy: str, spare: int, poison: bool) -> None:
    memgraph, plain = lowered(graph, policy, spare, poison)
    missing = frozenset(r.buffer for r in memgraph.entry[::2])
    program = lower(memgraph, missing=missing, poison=poison, next_of=next_of_all(memgraph))
    step_of = {n.id: s.node.id for s in program.merged for n in (s.node, *s.bundled)}
    assert step_of.keys() == {s.node.id for s in plain.merged}
    order = reachable(program)
    for before, after in required(memgraph, plain):
        assert step_of[before] in order[step_of[after]]


# --- side by side ------------------------------------------------------------------------------


def copies(
    *offsets: tuple[int, int], nbytes: int = 64, lane: Lane = Lane.H2D, split: bool = False
) -> Bundles:
    """Make copies from their begins in the arena and in host memory."""
    arena = Arena(4096, torch.device("cpu"))
    found, host = Bundles(arena), torch.zeros(4096, dtype=torch.uint8)
    for node, (in_arena, in_host) in enumerate(offsets):
        memory = host.clone() if split and node else host
        lane_of = Lane.D2H if lane is Lane.D2H and node else Lane.H2D
        on_host = memory[in_host : in_host + nbytes]
        found.add(Transfer(node, lane_of, Extent(in_arena, 64), on_host))
    return found


def test_transfers_that_are_adjacent_on_both_sides_may_be_one_copy() -> None:
    assert copies((0, 512), (64, 576), (128, 640)).next_of == {0: 1, 1: 2}


def test_bytes_at_the_end_of_an_extent_are_copied_too_if_the_host_has_as_many() -> None:
    found = copies((0, 512), (64, 576), nbytes=40)
    assert found.next_of == {0: 1}
    on_device, on_host, extent = found.ends_of([0, 1])
    assert on_device.numel() == on_host.numel() == 104
    assert on_host.storage_offset() == 512 and on_device.storage_offset() == 0
    assert extent == Extent(0, 128)


@pytest.mark.parametrize(
    ("offsets", "others"),
    [
        (((0, 0), (128, 64)), {}),
        (((0, 0), (128, 128)), {}),
        (((0, 0), (64, 128)), {}),
        (((64, 64), (0, 0)), {}),
        (((0, 0), (64, 64)), {"lane": Lane.D2H}),
        (((0, 0), (64, 64)), {"split": True}),
    ],
    ids=["arena", "both", "host", "backwards", "lanes", "allocations"],
)
def test_others_are_copies_of_their_own(
    offsets: tuple[tuple[int, int], ...], others: dict[str, object]
) -> None:
    assert copies(*offsets, **others).next_of == {}  # type: ignore[arg-type]


def test_memory_that_another_allocation_continues_by_chance_is_not_bundles() -> None:
    """One copy must not read beyond an allocation, and pinned memory is pinned by allocation."""
    host = torch.zeros(128, dtype=torch.uint8)
    found = Bundles(Arena(128, torch.device("cpu")))
    found.add(Transfer(0, Lane.H2D, Extent(0, 64), host[:64]))
    found.add(
        Transfer(
            1, Lane.H2D, Extent(64, 64), torch.frombuffer(host.numpy()[64:], dtype=torch.uint8)
        )
    )
    assert found.next_of == {}


def test_a_bundle_has_a_largest_size() -> None:
    nbytes = MOST_BUNDLE_BYTES // 2
    host = torch.zeros(4 * nbytes, dtype=torch.uint8)
    found = Bundles(Arena(4 * nbytes, torch.device("cpu")))
    for i in range(4):
        begin = i * nbytes
        found.add(Transfer(i, Lane.H2D, Extent(begin, nbytes), host[begin : begin + nbytes]))
    assert found.next_of == {0: 1, 2: 3}


# --- passes ----------------------------------------------------------------------------------


def small_products() -> tuple[TaskGraph, dict[str, torch.Tensor]]:
    """Let one task read several small weights."""
    draft = Draft()
    out = draft.tensor(OUTPUT, ROWS * NUM)
    weights = {f"w{i}": torch.randn(ROWS) for i in range(NUM)}
    tensors = [draft.tensor(WEIGHT, ROWS, name=name) for name in weights]
    y, large = draft.tensor(ACTIVATION, ROWS * NUM), draft.tensor(ACTIVATION, ROWS * NUM)
    draft.task("aten.cat.default", tuple(tensors), out=(y,))
    draft.task("aten.mul.Tensor", y, 2, out=(large,))
    draft.task("aten.add.Tensor", large, y, out=(out,))
    return draft.graph((), (out,)), weights


def side_by_side(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    block = torch.cat([byte_view(w) for w in weights.values()])
    return dict(zip(weights, block.split(ROWS * 4), strict=True))


def bundling(rig: Callable[..., Rig], **others: Any) -> tuple[Rig, dict[str, torch.Tensor]]:
    """Return an executor whose reloads can be one copy, and its weights."""
    graph, weights = small_products()
    nbytes = 2 * ROWS * NUM * 4
    masters = side_by_side(weights)
    return rig(graph, masters=masters, arena_bytes=nbytes, policy="horizon", **others), weights


def bundled_steps(made: Rig, kind: NodeKind) -> list[int]:
    """Return how many nodes each bundled step of a kind has."""
    program: Program = made.executor._steady
    found = [s for s in program.merged if s.node.kind is kind and s.bundled]
    return [1 + len(s.bundled) for s in found]


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.usefixtures("every_transfer_is_large")
def test_small_weights_that_lie_side_by_side_are_one_copy(
    rig: Callable[..., Rig], seed: int | None, poison: bool
) -> None:
    made, weights = bundling(rig, delay_seed=seed, poison=poison)
    expected = 3 * torch.cat(list(weights.values()))
    for _ in range(3):
        made.arena.bytes.fill_(0xFF)
        assert torch.equal(made()[0], expected)
    assert bundled_steps(made, NodeKind.RELOAD) == [NUM]
    assert made.executor.counters.reloaded_bytes == NUM * ROWS * 4


def test_masters_apart_are_copied_one_by_one(rig: Callable[..., Rig]) -> None:
    graph, weights = small_products()
    made = rig(graph, weights, arena_bytes=2 * ROWS * NUM * 4, policy="horizon")
    assert bundled_steps(made, NodeKind.RELOAD) == []


def test_a_recorded_pass_copies_one_by_one_so_that_each_has_a_span(
    rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = bundling(rig)
    made()
    made.executor.recorder = recorder = CpuSpanRecorder()
    monkeypatch.setattr(executor, "lower", lowered_once := Mock(wraps=lower))
    for _ in range(2):
        made()
    assert lowered_once.call_count == 1
    assert {s.node for s in recorder.spans()} == {s.node.id for s in lower(made.memgraph).merged}


@pytest.mark.parametrize("poison", [False, True])
def test_offloads_are_one_copy_too(rig: Callable[..., Rig], poison: bool) -> None:
    draft = Draft()
    x, w = draft.tensor(INPUT, ROWS), draft.tensor(WEIGHT, 2 * ROWS, name="w")
    a1, a2 = draft.tensor(ACTIVATION, ROWS), draft.tensor(ACTIVATION, ROWS)
    y, z = draft.tensor(OUTPUT, 2 * ROWS), draft.tensor(OUTPUT, ROWS)
    draft.task("aten.neg.default", x, out=(a1,))
    draft.task("aten.mul.Tensor", a1, 2, out=(a2,))
    draft.task("aten.neg.default", w, out=(y,))
    draft.task("aten.add.Tensor", a1, a2, out=(z,))
    weights = {"w": torch.randn(2 * ROWS)}
    made = rig(
        draft.graph((x,), (y, z)),
        weights,
        arena_bytes=2 * ROWS * 4,
        policy="horizon",
        poison=poison,
    )
    for _ in range(3):
        given = torch.randn(ROWS)
        found = made(given)
        assert torch.equal(found[0], -weights["w"])
        assert torch.equal(found[1], -given + -given * 2)
    assert bundled_steps(made, NodeKind.OFFLOAD) == [2]
