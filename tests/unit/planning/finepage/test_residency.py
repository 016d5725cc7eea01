"""Which bytes of the weights are kept beside a ring, and which go through it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.taskgraph import TaskGraph
from ds_finepage.planning.finepage.choices import Choice, Chooser
from ds_finepage.planning.finepage.residency import RingShape, WeightClasses
from ds_finepage.planning.problem import Problem
from ds_finepage.planning.rewrite.embeddings import gather_rows
from tests.property.experts import layers_of_experts
from tests.property.matmul_chains import matmul_chain
from tests.unit.planning.finepage.test_packed_weights import layers
from tests.unit.planning.sketches import chain, sketch

UNIT = 64
EXPERTS = layers_of_experts()
DENSE_BYTES, EXPERT_BYTES = 64 * 64 * 4, 8 * 64 * 64 * 4

SLOW_COPIES = HardwareProfile(
    name="made up",
    source="test",
    capacity_bytes=2**30,
    h2d_bytes_per_s=1e9,
    d2h_bytes_per_s=1e9,
    memory_bytes_per_s=1e12,
    flops_per_s={"default": 1e12},
    transfer_latency_ns=100_000,
)


def classes(graph: TaskGraph, *, may_split: bool = False) -> WeightClasses:
    return WeightClasses.of(Problem(graph, 0, UNIT), may_split=may_split)


def shape(ring_bytes: int) -> RingShape:
    return RingShape(ring_bytes, ring_bytes // 4)


def streamed(found: Choice | None) -> list[str]:
    assert found is not None
    return [found.graph.buffers[b].name for b in found.streamed]


def test_weights_that_every_pass_uses_whole_are_kept_before_experts() -> None:
    weights = classes(EXPERTS)
    ring = EXPERT_BYTES
    for num_dense in range(1, 4):
        found = streamed(Chooser(weights).choose(ring + num_dense * DENSE_BYTES, shape(ring)))
        assert len(found) == 9 - num_dense
        assert sum(name.endswith(("up", "down")) for name in found) == 6
    # Three of the experts' weights would fit as well, if not for the last of the others.
    found = streamed(
        Chooser(weights).choose(ring + 2 * DENSE_BYTES + 3 * EXPERT_BYTES, shape(ring))
    )
    assert len(found) == 4
    assert not any(name.endswith("dense") for name in found)


def test_what_rounding_leaves_over_at_one_weight_is_due_to_the_next() -> None:
    weights = classes(chain(8))
    assert streamed(Chooser(weights).choose(5 * UNIT, shape(UNIT))) == ["w1", "w2", "w4", "w6"]
    assert streamed(Chooser(weights).choose(3 * UNIT, shape(UNIT))) == [
        "w1",
        "w2",
        "w3",
        "w4",
        "w5",
        "w6",
    ]


def test_the_first_weights_are_kept_because_the_ring_is_empty_when_a_pass_begins() -> None:
    """Six of eight fit, and the two that stream come late."""
    graph = sketch(
        "small:64 " + " ".join(f"w{n}:128" for n in range(8)) + " a:64",
        "small a -> a",
        *(f"w{n} a -> a" for n in range(8)),
    )
    found = streamed(Chooser(classes(graph)).choose(64 + 6 * 128 + 128, shape(128)))
    assert found == ["w5", "w6"]


def test_what_is_larger_than_the_ring_is_kept() -> None:
    graph = sketch(
        "w0:640 w1:64 w2:64 w3:64 a:64", "w0 -> a", "w1 a -> a", "w2 a -> a", "w3 a -> a"
    )
    weights = classes(graph)
    assert streamed(Chooser(weights).choose(640 + 128, shape(128))) == ["w1", "w2", "w3"]
    assert Chooser(weights).choose(640 + 127, shape(128)) is None


def test_weights_up_to_a_share_of_the_largest_are_kept() -> None:
    for nbytes, fixed_bytes in ((63_936, 0), (64_000, 64)):
        graph = sketch(f"w0:{nbytes} w1:64 a:64", "w0 -> a", "w1 a ->")
        assert classes(graph).fixed_bytes == fixed_bytes


def test_rings_for_whole_weights_hold_one_or_two_of_the_three_largest_sizes() -> None:
    graph = sketch(
        "w0:640 w1:1280 w2:64 w3:128 a:64",
        *(f"{weight} a -> a" for weight in ("w0", "w1", "w2", "w3")),
    )
    lengths = [found.nbytes for found in classes(graph).ring_shapes(0)]
    assert lengths == [128, 192, 256, 640, 960, 1280, 1280, 1920, 2560]


def large_rings(weights: WeightClasses, room: int) -> list[RingShape]:
    return [ring for ring in weights.ring_shapes(room) if ring.grain_bytes]


def test_rings_for_large_slices_follow_from_latency_and_missing_bytes() -> None:
    graph = matmul_chain([640] * 12)
    for latency_ns, factor in ((SLOW_COPIES.transfer_latency_ns, 1), (0, 0)):
        profile = dataclasses.replace(SLOW_COPIES, transfer_latency_ns=latency_ns)
        weights = WeightClasses.of(Problem(graph, 0, UNIT, profile, split=True), may_split=True)
        room = graph.weight_bytes * 2 // 3
        best = math.sqrt(weights.latency_bytes * weights.missing_bytes(room))
        wanted = [(4, 1), (1, 1), (2, math.sqrt(3)), (8, 3)][: 4 * factor]
        found = list(dict.fromkeys((r.nbytes, r.slice_bytes) for r in large_rings(weights, room)))
        assert [nbytes // length for nbytes, length in found] == [n for n, _ in wanted]
        assert [nbytes for nbytes, _ in found] == [
            pytest.approx(best * length, abs=UNIT) for _, length in wanted
        ]


def test_rings_for_large_slices_are_no_longer_than_their_room() -> None:
    graph = matmul_chain([640] * 12)
    weights = WeightClasses.of(Problem(graph, 0, UNIT, SLOW_COPIES, split=True), may_split=True)
    room = weights.fixed_bytes + 2 * weights.least_ring_bytes() + UNIT - 1
    found = large_rings(weights, room)
    assert {ring.nbytes for ring in found} == {2 * weights.least_ring_bytes()}
    assert len(set(found)) > 2  # with several sizes of a slice
    assert all(Chooser(weights).choose(room, ring) is not None for ring in found)


def test_all_are_kept_without_a_ring() -> None:
    weights = classes(chain(8))
    assert Chooser(weights).choose(8 * UNIT, shape(0)) == Choice(weights.problem.graph, [])
    assert list(weights.ring_shapes(8 * UNIT)) == [shape(0)]
    assert shape(0) not in weights.ring_shapes(8 * UNIT - 1)


def test_weights_of_two_uses_and_small_ones_are_fixed() -> None:
    graph = sketch(
        "w0:64000 w1:64 w2:6400 w3:6400 a:64",
        *("w0 -> a", "w1 a -> a", "w2 a -> a", "w3 a -> a", "w2 a ->"),
    )
    weights = classes(graph)
    assert weights.order == [0, 3]
    assert weights.fixed_bytes == 64 + 6400
    assert Chooser(weights).choose(weights.fixed_bytes + 63999, shape(64000)) is None
    assert streamed(Chooser(weights).choose(weights.fixed_bytes + 64000, shape(64000))) == [
        "w0",
        "w3",
    ]


def test_missing_bytes_are_those_without_room() -> None:
    weights = classes(chain(8))
    assert weights.missing_bytes(5 * UNIT) == 3 * UNIT
    assert weights.missing_bytes(9 * UNIT) <= 0


def test_the_shortest_ring_holds_what_one_task_needs() -> None:
    assert classes(chain(8, nbytes=256)).least_ring_bytes() == 256
    two = sketch("w0:128 w1:192 a:64", "w0 w1 -> a")
    assert classes(two).least_ring_bytes() == 2 * (128 + 192)
    cut = classes(gather_rows(matmul_chain([64, 256])), may_split=True)
    assert cut.least_ring_bytes() == 2 * 16 * 64 * 4


@pytest.mark.parametrize("percent", (10, 30, 50, 70, 90))
def test_weights_that_can_be_cut_keep_the_same_share_of_their_rows(percent: int) -> None:
    graph = gather_rows(matmul_chain([64, 512, 64, 512, 512]))
    weights = classes(graph, may_split=True)
    total = sum(weights.sizes[b] for b in weights.order)
    ring = weights.least_ring_bytes()
    found = Chooser(weights).choose(
        weights.fixed_bytes + ring + total * percent // 100, shape(ring)
    )
    assert found is not None
    parts = [found.graph.buffers[b] for b in found.streamed]
    for buffer in weights.divisible:
        whole = graph.buffers[buffer]
        missing = sum(p.nbytes for p in parts if p.name == whole.name)
        quantum = 16 * weights.divisible[buffer].row_bytes
        share = whole.nbytes * (100 - percent) // 100
        assert share - quantum <= missing <= share + quantum
    kept = total - sum(p.nbytes for p in parts)
    assert total * percent // 100 - 32 * 512 * 4 <= kept <= total * percent // 100


def test_no_more_rows_stream_than_a_weight_has(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = layers(6)  # the extents of its packed weights are longer than their rows
    problem = Problem(graph, 0, UNIT, dataclasses.replace(SLOW_COPIES, launch_ns=100))
    weights = WeightClasses.of(problem, may_split=True)
    ring = RingShape(83520, 41760, grain_bytes=20880)
    found = []
    monkeypatch.setattr(Chooser, "_cut", lambda _, kept_rows, *rest: found.append(kept_rows))
    Chooser(weights).choose(weights.fixed_bytes + ring.nbytes, ring)
    assert [set(kept_rows.values()) for kept_rows in found] == [{0}]


def test_a_table_that_did_not_give_way_to_its_rows_is_kept() -> None:
    graph = matmul_chain([64, 256], vocabulary=512)
    (table,) = (b.id for b in graph.buffers if b.name == "table")
    weights = classes(graph)
    assert table not in weights.order
    assert weights.fixed_bytes == 512 * 64 * 4


def test_matrices_stream_however_large_the_table_is() -> None:
    graph = matmul_chain([64, 16, 16], vocabulary=20_000)  # a thousandth of it is 5,120 bytes
    assert len(classes(graph).order) == 2


def test_few_large_weights_stream_where_copies_take_long_to_start() -> None:
    graph = gather_rows(matmul_chain([64, 512, 64, 64, 512, 64, 64]))
    sizes = {64 * 512 * 4}
    for profile, grains in ((None, set()), (SLOW_COPIES, sizes)):
        weights = WeightClasses.of(Problem(graph, 0, UNIT, profile), may_split=False)
        whole = weights.fixed_bytes + sum(weights.sizes[b] for b in weights.order)
        rings = large_rings(weights, whole * 9 // 10)
        assert {ring.grain_bytes for ring in rings} == grains
        assert not large_rings(weights, whole * 4 // 10)  # bytes count more there
        assert all(ring.keeps_small and ring.nbytes >= ring.grain_bytes for ring in rings)
