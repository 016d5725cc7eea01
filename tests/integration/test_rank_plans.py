"""Plans of a model on one rank and on two, for written rates: the bytes of a rank, and its time.

The ranks hold each weight together, or each has a shard of its own with tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ds_finepage.capture.from_config import capture_config
from ds_finepage.capture.shards import cutting
from ds_finepage.execution import collectives as ops
from ds_finepage.execution.measure import estimate_workspaces
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.parts import with_parts
from ds_finepage.graph.taskgraph import BufferKind, TaskGraph
from ds_finepage.planning.pipeline import Planned, PlanSettings, needs_of, plan_checked
from ds_finepage.planning.simulator import simulate
from tests.integration.families import make_model

assert ops  # defines them

PHASES = (("prefill", 8), ("decode", 16))
NUM_STEPS = 3
RATES = HardwareProfile(
    name="fixed",
    source="written down for tests",
    capacity_bytes=1 << 40,
    h2d_bytes_per_s=8e9,
    d2h_bytes_per_s=8e9,
    memory_bytes_per_s=1e10,
    flops_per_s={"default": 2e10},
    launch_ns=20_000,
    transfer_latency_ns=500,
    rank_bytes_per_s=4e9,
    rank_latency_ns=20_000,
)
"""Ops take long beside copies, so a pass has time for the fewest bytes."""

BUSY = replace(RATES, launch_ns=5000, transfer_latency_ns=3000)
"""Ops are so short that a pass waits for its copies."""

UNKNOWN = {"rank_bytes_per_s": 0.0, "rank_latency_ns": 0}


def captured(num_ranks: int) -> list[TaskGraph]:
    """Return a prefill and a decode step of one rank."""
    config = make_model("llama", vocab_size=96, intermediate_size=384).config
    return [
        estimate_workspaces(
            capture_config(
                config,
                phase=phase,
                batch=2,
                seq=seq,
                dtype="float32",
                prepare=cutting(num_ranks, None),
            ),
            on_accelerator=False,
        )
        for phase, seq in PHASES
    ]


def in_parts(graph: TaskGraph) -> TaskGraph:
    weights = {b.name: b.nbytes for b in graph.buffers if b.kind is BufferKind.WEIGHT}
    return with_parts(graph, weights, 2)


@pytest.fixture(scope="module")
def passes() -> dict[str, list[TaskGraph]]:
    one = captured(1)
    return {"one": one, "shards": captured(2), "parts": list(map(in_parts, one))}


def planned(graphs: Sequence[TaskGraph], profile: HardwareProfile) -> list[Planned]:
    """Plan passes under 70% of the weights."""
    settings = PlanSettings(policy="finepage", split=False, alignment=64, profile=profile)
    found = []
    for graph in graphs:
        around_bytes = needs_of(graph, alignment=64, cuts_weights=False).non_arena_bytes
        found.append(plan_checked(graph, graph.weight_bytes * 7 // 10 - around_bytes, settings))
    return found


def reloaded(graphs: Sequence[TaskGraph], profile: HardwareProfile) -> int:
    prefill, decode = (found.memgraph.reloaded_bytes for found in planned(graphs, profile))
    return prefill + NUM_STEPS * decode


@pytest.mark.parametrize("how", ["shards", "parts"])
@pytest.mark.parametrize("link", [{}, UNKNOWN, {"rank_latency_ns": 300_000}])
def test_a_rank_reloads_its_share_of_what_one_rank_reloads(
    passes: dict[str, list[TaskGraph]], how: str, link: dict[str, float]
) -> None:
    profile = replace(RATES, **link)  # type: ignore[arg-type]
    share = reloaded(passes[how], profile) / reloaded(passes["one"], profile)
    if share > 0.52:  # few large weights stream, for fewer collects
        assert share <= 0.54
        known, blind = (
            sum(simulate(p.memgraph, profile).total_ns for p in planned(passes[how], given))
            for given in (profile, replace(profile, **UNKNOWN))  # type: ignore[arg-type]
        )
        assert known <= 0.9 * blind
    assert share > 0


@pytest.mark.parametrize("rates", [RATES, BUSY], ids=["long ops", "short ops"])
@pytest.mark.parametrize("latency_ns", [20_000, 100_000, 3_000_000])
def test_bytes_of_a_rank_are_spent_on_time_alone(
    passes: dict[str, list[TaskGraph]], rates: HardwareProfile, latency_ns: int
) -> None:
    """A plan that knows the link is never slower, and moves more only where that is faster."""
    linked = replace(rates, rank_latency_ns=latency_ns)
    pairs = zip(
        planned(passes["parts"], replace(rates, **UNKNOWN)),  # type: ignore[arg-type]
        planned(passes["parts"], linked),
        strict=True,
    )
    shares = []
    for pair in pairs:
        (blind_bytes, blind_ns), (bytes_, ns) = (
            (p.memgraph.reloaded_bytes, simulate(p.memgraph, linked).total_ns) for p in pair
        )
        assert ns <= (1.001 if bytes_ <= blind_bytes else 1 / 1.005) * blind_ns
        shares.append(ns / blind_ns)
    if latency_ns == 3_000_000:
        assert max(shares) < 0.75  # a collect is all that counts, and there are fewer
