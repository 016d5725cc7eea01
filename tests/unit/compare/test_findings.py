"""The findings of a report: winners, the same pass by other policies, other budgets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_finepage.compare import findings
from ds_finepage.compare.findings import best_other, budget_lines, find
from ds_finepage.errors import ConfigError, InvalidPlanError, PlanInfeasibleError
from ds_finepage.graph import codec
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.simulator import simulate
from ds_finepage.reporting.findings import PROFILE_FILE, Findings, MemoryRow, memory_row
from ds_finepage.reporting.results import PhaseFigures
from tests.unit.reporting.folders import HARDWARE, MS, RESULTS, made_run, observed, planned

PASSES = {"finepage_b1": [observed("prefill"), observed(), observed("decode_2")]}
SINGLE = replace(RESULTS, settings=None)


def test_the_winner_and_the_reason_are_named(tmp_path: Path) -> None:
    found = find(tmp_path, RESULTS, {})
    assert found.fastest == {"finepage_b1"}
    assert any("Batch 1, decode step: finepage is fastest" in s for s in found.sentences)
    assert (
        "Why: a decode step of finepage copies 300 B to the device, and one of zero-persistence "
        "500 B." in found.sentences
    )


def test_a_winner_that_is_not_ours_is_named(tmp_path: Path) -> None:
    runs = (made_run("static", 100, 1), *RESULTS.runs)
    found = find(tmp_path, replace(RESULTS, runs=runs), {})
    assert found.fastest == {"static_b1"}
    assert not any(sentence.startswith("Why") for sentence in found.sentences)


def row_of(policy: str) -> MemoryRow:
    return memory_row(planned(policy).memgraph, planned(policy).timeline)


class FakePlanner:
    """Plans the passes of another model than that of the folder."""

    def planned(self, policy: str) -> Any:
        if policy == "zero-persistence":
            raise PlanInfeasibleError("it has no room")
        return planned(policy), planned("horizon")


def test_policies_plan_the_captured_model_where_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(
        findings, "modeller_in", lambda f, r, batch: asked.append(batch) or FakePlanner()
    )
    found = find(tmp_path, RESULTS, PASSES)
    assert asked == [1] and found.remarks == () and found.hardware == HARDWARE
    ours, other, paging = found.passes["finepage_b1"]["prefill"]
    assert ours == row_of("finepage") and paging == row_of("lru")
    assert other == ("zero-persistence", None, "no plan. it has no room")
    assert found.passes["finepage_b1"]["decode"][0] == row_of("horizon")


def test_the_best_other_system_is_the_fastest_that_can_be_planned() -> None:
    ours = RESULTS.runs[2]
    slow, fast, horizon = (
        made_run(arm, 1, ms) for arm, ms in (("zero", 9), ("static", 4), ("finepage-horizon", 1))
    )
    assert best_other(replace(RESULTS, runs=(slow, fast, horizon, ours)), ours) == "static"
    assert best_other(replace(RESULTS, runs=(ours,)), ours) == "zero-persistence"
    fast = replace(fast, budget_bytes=10, peak_bytes=11)
    assert best_other(replace(RESULTS, runs=(slow, fast, horizon, ours)), ours) == "zero"


def test_a_single_run_is_planned_with_the_profile_and_the_times_of_its_machine(
    tmp_path: Path,
) -> None:
    memgraph = PASSES["finepage_b1"][1].memgraph
    tasks = tuple(replace(task, time_ns=MS) for task in memgraph.graph.tasks)
    memgraph = replace(memgraph, graph=replace(memgraph.graph, tasks=tasks))
    passes = {"finepage_b1": [replace(PASSES["finepage_b1"][1], memgraph=memgraph)]}
    assert find(tmp_path, SINGLE, passes) == Findings()
    profile = replace(load_profile(HARDWARE), name="here")
    codec.save(profile, tmp_path / PROFILE_FILE)
    found = find(tmp_path, SINGLE, passes)
    assert found.hardware == "here" and found.sentences == () and not found.fastest
    ours, other, paging = found.passes["finepage_b1"]["decode"]
    assert [p[0] for p in (ours, other, paging)] == ["finepage", "zero-persistence", "lru"]
    assert ours == memory_row(memgraph, simulate(memgraph, profile, entry_missing=memgraph.lost))
    assert ours[1] is not None and paging[1] is not None
    assert 9 * MS <= ours[1].at[-1] <= paging[1].at[-1]
    assert other[1] is None
    assert other[2].startswith("no plan. policy 'zero-persistence' holds 640 B")
    assert other[2].endswith("...") and len(other[2]) <= len("no plan. ") + 110
    (tmp_path / PROFILE_FILE).write_text("{")
    with pytest.raises(InvalidPlanError, match="profile.json"):
        find(tmp_path, SINGLE, PASSES)


class FakeModeller:
    """Takes as many milliseconds as the budget lacks of 100% of the weights."""

    def __init__(self, budget: str) -> None:
        self.percent = float(budget.removesuffix("%weights"))
        self.budget_bytes = int(self.percent * 10)

    def at(self, device_budget: str) -> FakeModeller:
        return FakeModeller(device_budget)

    def figures(self, policy: str) -> Any:
        if policy == "zero" and self.percent < 100:
            raise PlanInfeasibleError("too small")
        slower = int(self.percent) if policy == "zero-persistence" else 0
        return None, PhaseFigures(modelled_ns=int(200 - self.percent) + slower)


def test_each_policy_is_planned_under_several_budgets() -> None:
    assert budget_lines(FakeModeller("50%weights"), 2, iter) == {
        "finepage": [(200, 180), (500, 150), (1100, 90)],
        "horizon": [(200, 180), (500, 150), (1100, 90)],
        "zero-persistence": [(200, 200), (500, 200), (1100, 200)],
        "zero": [(200, None), (500, None), (1100, 90)],
    }


def test_a_model_that_is_gone_leaves_out_a_picture_and_nothing_else(tmp_path: Path) -> None:
    found = find(tmp_path, RESULTS, {}, num_budgets=3)
    assert found.curves == {} and found.sentences
    (remark,) = found.remarks
    assert (
        "There are no pictures of other policies and budgets: the model is neither in llama-7b"
        in remark
    )
    with pytest.raises(ConfigError, match="the model is neither in"):
        findings.modeller_in(tmp_path, RESULTS, 1)
