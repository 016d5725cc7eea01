"""The figures of a plan: each one in its place, worked out from the others as it says."""

from __future__ import annotations

import dataclasses

import pytest

from ds_finepage.graph.memgraph import EdgeKind, MemGraph
from ds_finepage.planning.finepage.ring import place_activations, write_plan
from ds_finepage.planning.finepage.small_arena import weights_by_first_use
from ds_finepage.planning.finepage.stacking import stack_down
from ds_finepage.planning.problem import Problem
from ds_finepage.reporting.figures import PlanFigures, entry_bytes
from tests.unit.planning.sketches import chain, edges, largest_live_bytes

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
    plan_seconds=2.5,
)


def test_a_step_makes_a_token_of_each_sequence_and_a_prefill_reads_all() -> None:
    assert FIGURES.tokens_per_s == pytest.approx(4 / 3)
    assert dataclasses.replace(FIGURES, phase="prefill").tokens_per_s == pytest.approx(400 / 3)
    assert dataclasses.replace(FIGURES, predicted_ns=0).tokens_per_s == 0


def shown(figures: PlanFigures) -> list[tuple[str, str]]:
    return [(label.strip(), shown) for label, shown in figures.lines() if shown is not None]


def test_each_line_of_the_table_shows_its_own_figure() -> None:
    assert shown(FIGURES) == [
        ("weights", "1.00 GiB"),
        ("KV cache", "9.00 GiB on the device"),
        ("budget", "2.00 GiB"),
        ("least that can run", "3.00 GiB"),
        ("peak", "4.00 GiB"),
        ("host memory", "10.00 GiB"),
        ("reloaded by the first pass", "5.00 GiB"),
        ("reloaded by each pass", "12.00 GiB (1.50 x)"),
        ("least possible, one batch at a time", "8.00 GiB"),
        ("may stay by this bound", "any byte of weights"),
        ("offloaded by each pass", "7.00 GiB"),
        ("KV cache copied by each pass", "11.00 GiB"),
        ("time of a pass", "3.00 s (1.50 x)"),
        ("least possible, one batch at a time", "2.00 s"),
        ("compute", "5.00 s"),
        ("transfer, busier lane", "6.00 s"),
        ("stall", "8.00 s"),
        ("tokens a second", "1.33"),
        ("tasks", "11"),
        ("planning", "2.50 s"),
    ]


def test_the_bound_of_a_cache_in_host_memory_lets_any_byte_of_it_stay() -> None:
    found = dict(shown(dataclasses.replace(FIGURES, kv_on_host=True)))
    assert found["may stay by this bound"] == "any byte of weights and KV cache"
    assert found["KV cache"] == "9.00 GiB in host memory"


def test_the_table_of_a_rank_says_what_it_sends_and_what_all_ranks_make() -> None:
    figures = dataclasses.replace(FIGURES, num_ranks=4, sent_bytes=3 << 20)
    found = dict(shown(figures))
    assert found["sent to the next rank by each pass"] == "3.00 MiB"
    assert found["tokens a second, all ranks together"] == "1.33"
    assert "tokens a second" not in found
    assert figures.title == "m, decode, batch 4, sequence 100, finepage on t4, each of 4 ranks"


def kept(offset: int) -> MemGraph:
    """Keep two of four weights, the lower one at ``offset``; the others take turns at 64."""
    graph = chain(4)
    weights = weights_by_first_use(graph)
    at = stack_down([0, 2], dict.fromkeys(weights, UNIT), offset + 2 * UNIT)
    problem = Problem(graph, offset + 2 * UNIT, UNIT)
    found = write_plan(
        problem,
        streamed=[weights[1], weights[3]],
        activations=place_activations(problem),
        ring_bytes=UNIT,
        residents=at,
    )
    assert found is not None
    return found


def test_what_a_pass_finds_and_what_is_live_is_counted() -> None:
    tight = kept(2 * UNIT)
    assert entry_bytes(tight) == 2 * UNIT
    assert largest_live_bytes(tight) == tight.peak_bytes == 4 * UNIT
    # The second streamed weight lies where the first did.
    assert len(edges(tight, EdgeKind.MEMORY)) == 1
    loose = kept(6 * UNIT)
    assert largest_live_bytes(loose) == 4 * UNIT < loose.peak_bytes == 8 * UNIT
