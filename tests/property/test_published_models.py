"""Plans of models with published dimensions stay close to the bounds; nothing is run.

A whole table, LLaMA-65B and Llama-2-70B included, is benchmarks/planner_bounds_2026-11-21.md.
"""

from __future__ import annotations

import pytest

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.bounds import lower_bound_bytes
from ds_finepage.planning.budget import LARGE_SHARE
from ds_finepage.whatif import CapturedModel, capture_model, plan_captured
from tests.unit.planning.sketches import largest_live_bytes

CELLS = [("t4", 10), ("t4", 75), ("v100-16gb", 25), ("v100-16gb", 90), ("h200", 50)]


@pytest.fixture(scope="module", params=("decode", "prefill"))
def captured(request: pytest.FixtureRequest) -> CapturedModel:
    profile = load_profile("v100-16gb")
    return capture_model("llama-7b", phase=request.param, batch=1, seq=2048, profile=profile)


@pytest.mark.parametrize(("hardware", "percent"), CELLS)
def test_bytes_time_and_layout_stay_close_to_the_bounds(
    captured: CapturedModel, hardware: str, percent: int
) -> None:
    budget_bytes = captured.graph.weight_bytes * percent // 100
    profile = load_profile(hardware)
    found = plan_captured(captured, budget_bytes=budget_bytes, profile=profile)
    figures = found.figures
    assert figures.kv_on_host is (captured.kv_bytes * LARGE_SHARE >= budget_bytes)
    # The printed bound lets weights use what a task leaves of the largest workspace; no plan in
    # this arena can.
    memgraph = found.memgraph
    planned = captured.on_host if figures.kv_on_host else captured
    assert planned is not None
    least = lower_bound_bytes(planned.graph, memgraph.arena_bytes, memgraph.alignment, may_cut=True)
    assert figures.lower_bound_bytes <= least <= figures.reloaded_bytes <= 1.02 * least
    assert figures.lower_bound_ns <= figures.predicted_ns <= 1.05 * figures.lower_bound_ns
    assert figures.offloaded_bytes == 0
    live_bytes = largest_live_bytes(memgraph)
    assert live_bytes <= memgraph.peak_bytes <= 1.02 * live_bytes
    assert figures.peak_bytes <= budget_bytes


@pytest.mark.parametrize("percent", (10, 75))
def test_a_kv_cache_in_host_memory_makes_a_prefill_faster_and_a_step_no_slower(
    captured: CapturedModel, percent: int
) -> None:
    budget_bytes, profile = captured.graph.weight_bytes * percent // 100, load_profile("h200")
    here, there = (
        plan_captured(captured, budget_bytes=budget_bytes, profile=profile, kv_cache=place).figures
        for place in ("device", "host")
    )
    assert there.kv_on_host and not here.kv_on_host
    if captured.phase == "prefill":
        assert there.predicted_ns < here.predicted_ns
    else:  # most of its rows stay on the device
        assert there.predicted_ns == pytest.approx(here.predicted_ns, rel=0.01)
    assert there.lower_bound_ns <= there.predicted_ns
    assert there.peak_bytes <= budget_bytes


@pytest.mark.parametrize("percent", (25, 90))
def test_horizon_never_does_with_less(captured: CapturedModel, percent: int) -> None:
    budget_bytes = captured.graph.weight_bytes * percent // 100
    profile = load_profile("v100-16gb")
    ours = plan_captured(captured, budget_bytes=budget_bytes, profile=profile).figures
    try:
        other = plan_captured(
            captured, budget_bytes=budget_bytes, profile=profile, policy="horizon"
        ).figures
    except PlanInfeasibleError:
        return  # some whole weight does not fit
    assert other.reloaded_bytes + other.offloaded_bytes >= ours.reloaded_bytes
    assert other.predicted_ns >= ours.predicted_ns


def test_a_cache_of_many_times_the_card_costs_what_does_not_fit() -> None:
    profile = load_profile("a100-80gb")
    shape = {"phase": "decode", "batch": 8, "seq": 131_072}
    captured = capture_model("llama-3.1-8b", **shape, profile=profile)
    times = []
    for gib in (140, 100, 75, 40, 12):
        found = plan_captured(captured, budget_bytes=gib << 30, profile=profile).figures
        assert found.kv_on_host and found.offloaded_bytes == 0
        times.append(found.predicted_ns)
        if gib <= 75:
            assert found.predicted_ns <= 1.06 * found.lower_bound_ns
    assert times == sorted(times)
    assert times[2] <= 3.2e9
