"""The probe: which figures it finds, and how it makes them of times."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from ds_finepage.execution import interplay, probe
from ds_finepage.execution.lanes import SMALL_TRANSFER_BYTES, CpuLanes
from ds_finepage.execution.program import LANES, Program, Step
from ds_finepage.execution.spans import CpuSpanRecorder
from ds_finepage.graph.hardware import DETAILS
from ds_finepage.graph.memgraph import Lane, Node, NodeKind
from ds_finepage.graph.profiles import require_usable

CPU = torch.device("cpu")
MIB = 1 << 20


def test_a_probe_finds_every_detail() -> None:
    found = require_usable(probe.probe(CPU, scratch_bytes=4 * MIB))
    assert [nbytes for nbytes, _ in found.copy_shares] == [128 << 10, 512 << 10, 2 * MIB]
    assert max(share for _, share in found.copy_shares) == 1.0
    assert found.one_lane_below_bytes == SMALL_TRANSFER_BYTES


def test_scratch_of_any_size_will_do() -> None:
    nbytes = (9 << 20) + 3  # as a share of a budget may be
    found = interplay.slowdowns(
        torch.zeros(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    )
    assert min(found) >= 1


def test_little_scratch_gives_rates_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attaching a small model stays fast, and its passes run in one lane."""
    for name in ("slowdowns", "wait_seconds", "step_seconds"):
        monkeypatch.delattr(probe, name)
    found = require_usable(probe.probe(CPU, scratch_bytes=MIB))
    assert {n: getattr(found, n) for n in DETAILS} == {
        **DETAILS,
        "one_lane_below_bytes": SMALL_TRANSFER_BYTES,
    }


def test_a_rate_is_net_of_the_latency_and_a_share_is_of_the_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    took = {128 << 10: 3e-6, 512 << 10: 9e-6, 2 * MIB: 17e-6}
    monkeypatch.setattr(probe, "_copy_seconds", lambda target, source, nbytes: took[nbytes])
    monkeypatch.setattr(probe, "slowdowns", lambda *memory: (1.5, 1.25))
    monkeypatch.setattr(probe, "wait_seconds", lambda *memory: 30e-6)
    monkeypatch.setattr(probe, "step_seconds", lambda memory: 4e-6)
    found = probe._links(2 * MIB, CPU, 1e-6)
    assert found["h2d_bytes_per_s"] == pytest.approx(2 * MIB / 16e-6)
    assert found["d2h_bytes_per_s"] == pytest.approx(2 * MIB / 17e-6)
    assert [share for _, share in found["copy_shares"]] == pytest.approx([0.5, 0.5, 1.0])
    assert (found["op_slowdown"], found["copy_slowdown"]) == (1.5, 1.25)
    assert (found["wait_ns"], found["step_ns"]) == (30_000, 4_000)


@pytest.mark.parametrize(
    ("rate", "scratch_bytes", "sizes"),
    [
        (1e9, 16 * MIB, [64, 128]),  # long enough
        (1e13, 16 * MIB, [64, 128, 256, 512]),  # the largest on a CPU
        (1e13, 3 * 256 * 256 * 4, [64, 128, 256]),  # no more room
    ],
)
def test_products_grow_until_one_takes_long_enough(
    monkeypatch: pytest.MonkeyPatch, rate: float, scratch_bytes: int, sizes: list[int]
) -> None:
    found = []

    def seconds(product: partial[torch.Tensor], device: torch.device) -> float:
        found.append(product.args[0].shape[0])
        return 2 * found[-1] ** 3 / rate

    monkeypatch.setattr(probe, "_seconds", seconds)
    assert probe._matmul_rate(torch.float32, CPU, scratch_bytes) == pytest.approx(rate)
    assert found == sizes


def test_a_walk_returns_to_its_beginning_where_a_piece_does_not_fit() -> None:
    walk = probe.Walk(torch.arange(10))
    assert [walk.next(n).tolist() for n in (4, 4, 4, 2)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [0, 1, 2, 3],
        [4, 5],
    ]


# --- what lanes do to each other -------------------------------------------------------------


def test_slowdowns_are_of_the_shortest_times() -> None:
    """Ops take 2 ms alone and 3 ms beside copies; copies 4 ms, and 6 ms beside ops."""
    noise = iter([1.0, 1.0, 1.0, 1.0, 5.0, 1.0] + [1.0, 7.0, 1.0] * 10)

    def side_by_side(num_ops: int, num_copies: int) -> tuple[float, float]:
        factor = next(noise) * (1.5 if num_ops and num_copies else 1.0)
        return 1e-3 * num_ops * factor, 2e-3 * num_copies * factor

    assert interplay._factors(side_by_side) == pytest.approx((1.5, 1.5))


def test_nothing_is_faster_beside_something_else() -> None:
    def side_by_side(num_ops: int, num_copies: int) -> tuple[float, float]:
        return (1e-3 * num_ops, 1e-3 * num_copies) if not num_ops * num_copies else (1e-9, 1e-9)

    assert interplay._factors(side_by_side) == (1.0, 1.0)


def test_both_sides_run_in_full() -> None:
    ops: list[int] = []
    copies: list[int] = []
    side_by_side = interplay._on_threads(ops.append, copies.append)
    op, copy = side_by_side(3, 5)
    assert (ops, copies) == ([0, 1, 2], [0, 1, 2, 3, 4])
    assert op > 0 and copy > 0
    assert side_by_side(0, 0) == pytest.approx((0, 0), abs=1e-2)


@pytest.fixture
def lanes() -> Iterator[CpuLanes]:
    made = CpuLanes()
    yield made
    made.close()


def test_copies_and_tasks_take_turns(lanes: CpuLanes) -> None:
    program = interplay._taking_turns(MIB)
    log: list[Lane] = []
    lanes.run(program, {s.node.id: lambda lane=s.lane: log.append(lane) for s in program.merged})
    assert log == [Lane.H2D, Lane.COMPUTE] * interplay.NUM_WAITS
    assert program.mean_transfer_bytes >= SMALL_TRANSFER_BYTES  # else it runs in one thread


def test_a_wait_takes_the_time_beyond_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    num = interplay.NUM_WAITS
    times = {num: 8e-3, 1: 8e-3 + 2 * num * 20e-6}
    monkeypatch.setattr(interplay, "_repeated", lambda run, count: times[count])
    memory = torch.zeros(MIB, dtype=torch.uint8)
    assert interplay.wait_seconds(memory, memory) == pytest.approx(20e-6)
    times[1] = 7e-3
    assert interplay.wait_seconds(memory, memory) == 0.0


def test_the_time_between_steps_is_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    num_gaps = interplay.NUM_STEPS - 1
    gaps = iter([900_000, 4_000 * num_gaps, 0])
    monkeypatch.setattr(interplay, "_gaps_ns", lambda *_: next(gaps))
    assert interplay.step_seconds(torch.zeros(MIB, dtype=torch.uint8)) == pytest.approx(4e-6)


def test_gaps_are_the_time_in_no_step(lanes: CpuLanes) -> None:
    ran: list[int] = []
    nodes = [Node(i, NodeKind.COMPUTE, task=0) for i in range(3)]
    steps = tuple(Step(n, Lane.COMPUTE, n.id + 1, (), signals=False) for n in nodes)
    program = Program({lane: steps if lane is Lane.COMPUTE else () for lane in LANES}, steps)
    recorder = CpuSpanRecorder()
    gaps_ns = interplay._gaps_ns(program, recorder, ran.append, lanes)
    spans = recorder.spans()
    between = [b.start_ns - a.end_ns for a, b in zip(spans, spans[1:], strict=False)]
    assert ran == [0, 1, 2] and gaps_ns == sum(between) and min(between) >= 0
