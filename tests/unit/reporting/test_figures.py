"""The figures of a plan: each one in its place, worked out from the others as it says."""

from __future__ import annotations

import dataclasses

import pytest

from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.planning.finepage.small_arena import plan_keeping, weights_by_first_use
from ds_finepage.planning.finepage.stacking import stack_down
from ds_finepage.planning.problem import Problem
from ds_finepage.reporting.figures import (
    PlanFigures,
    entry_bytes,
    largest_live_bytes,
    layout_overhead,
    num_memory_dependencies,
)
from tests.unit.planning.sketches import chain

UNIT = 64
NS = 10**9

FIGURES = PlanFigures(
    model="m",
    phase="decode",
    batch=4,
    seq=100,
    policy="finepage",
    hardware="t4",
    weight_bytes=1 << 30,
    kv_bytes=9 << 30,
    kv_on_host=False,
    budget_bytes=2 << 30,
    min_budget_bytes=3 << 30,
    peak_bytes=4 << 30,
    host_bytes=10 << 30,
    entry_reloaded_bytes=5 << 30,
    reloaded_bytes=12 << 30,
    offloaded_bytes=7 << 30,
    kv_copied_bytes=11 << 30,
    lower_bound_bytes=8 << 30,
    predicted_ns=3 * NS,
    compute_ns=5 * NS,
    transfer_ns=6 * NS,
    lower_bound_ns=2 * NS,
    stall_ns=8 * NS,
    num_tasks=11,
    num_memory_dependencies=13,
    capture_seconds=1.25,
    plan_seconds=2.5,
    layout_overhead=1.0625,
)


def test_a_step_makes_a_token_of_each_sequence_and_a_prefill_reads_all() -> None:
    assert FIGURES.tokens_per_s == pytest.approx(4 / 3)
    assert dataclasses.replace(FIGURES, phase="prefill").tokens_per_s == pytest.approx(400 / 3)
    assert dataclasses.replace(FIGURES, predicted_ns=0).tokens_per_s == 0


def test_all_figures_are_shown_but_those_that_the_title_names() -> None:
    assert FIGURES.title == "m, decode, batch 4, sequence 100, finepage on t4"
    of_a_rank = dataclasses.replace(FIGURES, num_ranks=4, sent_bytes=3 << 20)
    assert of_a_rank.title.endswith("t4, each of 4 ranks")
    shown, all_figures = of_a_rank.shown(), dataclasses.asdict(of_a_rank)
    named = ("model", "phase", "batch", "seq", "policy", "hardware", "num_ranks")
    assert all_figures.keys() - shown.keys() == set(named)
    assert {name: shown.pop(name) for name in all_figures if name not in named} == {
        name: value for name, value in all_figures.items() if name not in named
    }
    assert shown == {
        "tokens_per_s": pytest.approx(4 / 3),
        "reloaded_above_bound_share": 0.5,
        "predicted_above_bound_share": 0.5,
    }
    nothing = dataclasses.replace(FIGURES, lower_bound_bytes=0, lower_bound_ns=0).shown()
    assert nothing["reloaded_above_bound_share"] is None
    assert nothing["predicted_above_bound_share"] is None


def kept(offset: int) -> MemGraph:
    """Keep two of four weights, the lower one at ``offset``; the others take turns at 64."""
    graph = chain(4)
    weights = weights_by_first_use(graph)
    at = stack_down([0, 2], dict.fromkeys(weights, UNIT), offset + 2 * UNIT)
    found = plan_keeping(Problem(graph, offset + 2 * UNIT, UNIT), at)
    assert found is not None
    return found


def test_what_a_pass_finds_and_what_is_live_is_counted() -> None:
    tight = kept(2 * UNIT)
    assert entry_bytes(tight) == 2 * UNIT
    assert largest_live_bytes(tight) == 4 * UNIT
    assert layout_overhead(tight) == 1
    assert (
        num_memory_dependencies(tight) == 1
    )  # the second streamed weight lies where the first did
    loose = kept(6 * UNIT)
    assert largest_live_bytes(loose) < loose.peak_bytes == 8 * UNIT
    assert layout_overhead(loose) == loose.peak_bytes / largest_live_bytes(loose)
