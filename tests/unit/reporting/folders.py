"""A small result folder, for tests of the report and the trace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.pipeline import Planned, PlanSettings, plan_checked
from ds_finepage.reporting.results import (
    CompareSettings,
    ObservedPass,
    PhaseFigures,
    Results,
    Run,
    run_folder,
    save_passes,
    save_results,
)
from tests.unit.planning.sketches import chain

HARDWARE = "v100-16gb"
MS = 10**6
SETTINGS = CompareSettings(
    model="llama-7b",
    layers=2,
    ds_config="{}",
    device_budget="50%weights",
    batches=(1,),
    prompt_tokens=16,
    new_tokens=4,
    arms=("plain", "zero-persistence", "finepage"),
    hardware=HARDWARE,
    repeats=3,
)


def made_run(arm: str, h2d_bytes: int, modelled_ms: int, peak_bytes: int = 380) -> Run:
    step = PhaseFigures(
        h2d_bytes=h2d_bytes,
        modelled_ns=modelled_ms * MS,
        wall_ns=2 * modelled_ms * MS,
        lower_bound_bytes=200,
        lower_bound_ns=MS,
    )
    return Run(
        arm=arm,
        batch=1,
        tokens_equal=True,
        budget_bytes=384,
        peak_bytes=peak_bytes,
        prefill=step,
        decode=step,
        settings={"of": arm},
    )


RESULTS = Results(
    settings=SETTINGS,
    device="cpu",
    versions={"torch": "2.13.0"},
    date="2026-11-22",
    command="ds-finepage compare --model <llama-7b>",
    runs=(
        Run(arm="plain", batch=1, reason="the weights do not fit", settings={}),
        made_run("zero-persistence", 500, 5),
        made_run("finepage", 300, 3),
    ),
)


def planned(policy: str = "finepage") -> Planned:
    """Plan nine weights of 64 bytes in an arena for five buffers."""
    settings = PlanSettings(
        policy=policy, split=False, alignment=64, profile=load_profile(HARDWARE)
    )
    return plan_checked(chain(9), 5 * 64, settings)


def observed(name: str = "decode", *, measured: bool = True) -> ObservedPass:
    """Return a pass that took a microsecond longer than predicted."""
    found = planned()
    late = replace(found.timeline, total_ns=found.timeline.total_ns + 1000)
    return ObservedPass(
        name=name,
        memgraph=found.memgraph,
        predicted=found.timeline,
        measured=late if measured else None,
    )


def make_folder(folder: Path, results: Results = RESULTS) -> Path:
    """Write results, and a decode step of each run of ours."""
    folder.mkdir(exist_ok=True)
    save_results(results, folder)
    for run in results.runs:
        of_run = run_folder(folder, run.name)
        of_run.mkdir(parents=True)
        if run.arm == "finepage":
            save_passes([observed()], of_run)
    return folder
