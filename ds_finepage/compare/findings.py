"""Works out what a report shows beside the figures of its runs: winners, and other policies."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ds_finepage.compare.arms import ARMS, OURS
from ds_finepage.compare.judge import holds_budget, is_modelled, time_of, winners
from ds_finepage.errors import ConfigError, FinepageError
from ds_finepage.graph import codec
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.pipeline import PlanSettings, plan_checked
from ds_finepage.planning.policies import RUNNABLE
from ds_finepage.planning.simulator import simulate
from ds_finepage.reporting.findings import PROFILE_FILE, BudgetLine, Findings, SimulatedPass
from ds_finepage.reporting.results import (
    DECODE,
    PREFILL,
    ObservedPass,
    Results,
    Run,
)
from ds_finepage.units import format_bytes

BASELINE, PAGING = "zero-persistence", "lru"
CURVE_POLICIES = ("finepage", "horizon", "zero-persistence", "zero")
LEAST_PERCENT, MOST_PERCENT = 20, 110
"""Of the weights: the budgets at the ends of the picture of budgets."""

Progress = Callable[[Sequence[Any]], Iterable[Any]]


def find(
    folder: Path,
    results: Results,
    passes: Mapping[str, Sequence[ObservedPass]],
    *,
    hardware: str | None = None,
    num_budgets: int = 0,
    progress: Progress = iter,
) -> Findings:
    """Name the winners, plan the passes of our runs by other policies, and plan under more budgets.

    Args:
        folder: The folder of the results.
        results: The results.
        passes: Run name -> its observed passes.
        hardware: The profile to simulate other policies with; by default that of the results.
        num_budgets: Budgets to plan beside the compared one; 0 leaves the picture out.
        progress: Goes through the budgets, and shows it.

    Raises:
        ConfigError: The profile cannot be used.
        InvalidPlanError: The profile in the folder is damaged.
    """
    profile, is_measured = profile_of(folder, results, hardware)
    remarks: list[str] = []
    simulated = {}
    for run in results.runs:
        if profile is None or run.arm != OURS or not passes.get(run.name):
            continue
        policies = [best_other(results, run), PAGING]
        modeller = None
        if results.settings is not None and hardware is None:
            try:
                modeller = modeller_of(folder, results, run.batch, results.settings.device_budget)
            except FinepageError as error:
                remarks.append(f"Other policies plan the passes of the run: {error}")
        if modeller is not None:
            simulated[run.name] = planned_by(modeller, [OURS, *policies])
        else:
            simulated[run.name] = {
                found.name: beside(found.memgraph, policies, profile, keep_times=is_measured)
                for found in passes[run.name]
                if found.name in (PREFILL, DECODE)
            }
    curves = {}
    if num_budgets and results.settings is not None:
        try:
            curves = budget_lines(folder, results, num_budgets, progress)
        except FinepageError as error:
            remarks.append(f"There is no picture of other budgets: {error}")
    return Findings(
        is_modelled=results.settings is not None and is_modelled(results),
        sentences=sentences(results),
        fastest=frozenset(fastest(results)),
        hardware="" if profile is None else profile.name,
        passes=simulated,
        curves=curves,
        remarks=tuple(remarks),
    )


def profile_of(
    folder: Path, results: Results, hardware: str | None
) -> tuple[HardwareProfile | None, bool]:
    """Return the profile to simulate with, and whether it is of the machine that ran.

    Raises:
        ConfigError: There is no such profile.
        InvalidPlanError: The profile in the folder is damaged.
    """
    if hardware is not None:
        return load_profile(hardware), False
    if results.settings is not None:
        return load_profile(results.settings.hardware), False
    path = folder / PROFILE_FILE
    return (codec.load(path, HardwareProfile), True) if path.exists() else (None, False)


# Winners.


def sentences(results: Results) -> tuple[str, ...]:
    """Say who wins each batch, and why; nothing for a single run."""
    if results.settings is None:
        return ()
    found = []
    for batch in dict.fromkeys(run.batch for run in results.runs):
        won = winners(results, batch)
        found += [f"Batch {batch}, {winner.text()}." for winner in won]
        step = next((winner for winner in won if winner.part == "decode step"), None)
        if step is not None and step.other is not None and step.other is not step.run:
            ours, theirs = step.run.decode.h2d_bytes, step.other.decode.h2d_bytes
            if ours is not None and theirs is not None and ours < theirs:
                found.append(
                    f"Why: a decode step of {step.run.arm} copies {format_bytes(ours)} to the "
                    f"device, and one of {step.other.arm} {format_bytes(theirs)}."
                )
    return tuple(found)


def fastest(results: Results) -> list[str]:
    """Return the names of the runs with the fastest decode steps."""
    if results.settings is None:
        return []
    batches = dict.fromkeys(run.batch for run in results.runs)
    won = (winner for batch in batches for winner in winners(results, batch))
    return [winner.run.name for winner in won if winner.part == "decode step"]


def best_other(results: Results, ours: Run) -> str:
    """Return the policy of the fastest other system with this batch and budget that has plans."""
    modelled = is_modelled(results)
    timed = [
        (ns, ARMS[run.arm].policy)
        for run in results.runs
        if run.batch == ours.batch and run.arm in ARMS and holds_budget(run)
        if ARMS[run.arm].policy in RUNNABLE and not ARMS[run.arm].is_ours
        if (ns := time_of(run.decode, modelled=modelled)) is not None
    ]
    return min(timed, default=(0, BASELINE))[1]


# Other policies.


def beside(
    memgraph: MemGraph,
    policies: Sequence[str],
    profile: HardwareProfile,
    *,
    keep_times: bool,
) -> tuple[SimulatedPass, ...]:
    """Simulate a plan, and plans of the same pass by other policies in the same arena.

    Args:
        memgraph: The plan.
        policies: The other policies.
        profile: The machine.
        keep_times: It is the machine that ran the plan: use the plan and its measured times of ops.
            For another machine its policy plans again.
    """
    found = []
    if keep_times:
        timeline = simulate(memgraph, profile, entry_missing=memgraph.lost)
        found = [SimulatedPass(policy=memgraph.policy, memgraph=memgraph, timeline=timeline)]
    else:
        tasks = tuple(replace(task, time_ns=None) for task in memgraph.graph.tasks)
        memgraph = replace(memgraph, graph=replace(memgraph.graph, tasks=tasks))
        policies = [memgraph.policy, *policies]
    for policy in policies:
        settings = PlanSettings(
            policy=policy, split=False, alignment=memgraph.alignment, profile=profile
        )
        try:
            planned = plan_checked(memgraph.graph, memgraph.arena_bytes, settings)
        except FinepageError as error:
            found.append(SimulatedPass(policy=policy, reason=str(error)))
        else:
            found.append(
                SimulatedPass(policy=policy, memgraph=planned.memgraph, timeline=planned.timeline)
            )
    return tuple(found)


def planned_by(modeller: Any, policies: Sequence[str]) -> dict[str, tuple[SimulatedPass, ...]]:
    """Plan the prefill and the decode step by several policies, as the table of runs does.

    Args:
        modeller: Of the batch and the budget.
        policies: The policies.
    """
    found: dict[str, list[SimulatedPass]] = {PREFILL: [], DECODE: []}
    for policy in policies:
        try:
            planned = modeller.planned(policy, modeller.settings(policy))
        except FinepageError as error:
            for plans in found.values():
                plans.append(SimulatedPass(policy=policy, reason=str(error)))
            continue
        for plans, each in zip(found.values(), planned, strict=True):
            plans.append(
                SimulatedPass(policy=policy, memgraph=each.memgraph, timeline=each.timeline)
            )
    return {name: tuple(plans) for name, plans in found.items()}


# Other budgets.


def budget_lines(
    folder: Path, results: Results, num_budgets: int, progress: Progress
) -> dict[int, tuple[BudgetLine, ...]]:
    """Plan the decode step of each batch under several budgets.

    Args:
        folder: The folder of the results.
        results: The results of a comparison.
        num_budgets: Budgets beside the one of the comparison.
        progress: Goes through the budgets, and shows it.

    Raises:
        ConfigError: The model is not there any more.
        FinepageError: The model cannot be captured.
    """
    found = {}
    for batch in dict.fromkeys(run.batch for run in results.runs):
        times: dict[str, list[tuple[int, int | None]]] = {p: [] for p in CURVE_POLICIES}
        for budget in progress(budgets_of(results, num_budgets)):
            modeller = modeller_of(folder, results, batch, budget)
            for policy in CURVE_POLICIES:
                times[policy].append((modeller.budget_bytes, decode_ns(modeller, policy)))
        found[batch] = tuple(
            BudgetLine(policy=policy, points=tuple(sorted(points)))
            for policy, points in times.items()
        )
    return found


def budgets_of(results: Results, num_budgets: int) -> list[str]:
    """Return the budget of a comparison, and others, as a ds_config writes them."""
    assert results.settings is not None
    step = (MOST_PERCENT - LEAST_PERCENT) / max(1, num_budgets - 1)
    percents = [LEAST_PERCENT + step * number for number in range(num_budgets)]
    return [results.settings.device_budget, *(f"{percent:.3f}%weights" for percent in percents)]


def decode_ns(modeller: Any, policy: str) -> int | None:
    """Return the modelled time of a decode step; None if the budget is too small."""
    try:
        time_ns = modeller.figures(policy, modeller.settings(policy))[1].modelled_ns
    except FinepageError:
        return None
    assert time_ns is None or isinstance(time_ns, int)
    return time_ns


def modeller_of(folder: Path, results: Results, batch: int, device_budget: str) -> Any:
    """Capture the passes of a comparison again.

    Args:
        folder: The folder of the results.
        results: The results of a comparison.
        batch: Sequences in the batch.
        device_budget: As in a ds_config.

    Raises:
        ConfigError: The model is not there any more.
    """
    from ds_finepage.compare.modelling import Modeller  # imports torch
    from ds_finepage.compare.orchestrate import MODEL_FOLDER, modelled_dtype, modelled_options

    settings = results.settings
    assert settings is not None
    model = Path(settings.model)
    model = model if model.is_dir() else folder / MODEL_FOLDER
    if not model.is_dir():
        raise ConfigError(f"the model is neither in {settings.model} nor in {model}")
    ds_config = json.loads(settings.ds_config or "{}")
    return Modeller(
        str(model),
        batch=batch,
        prompt_tokens=settings.prompt_tokens,
        new_tokens=settings.new_tokens,
        device_budget=device_budget,
        hardware=settings.hardware,
        dtype=modelled_dtype(model, ds_config, settings.hardware),
        num_ranks=settings.num_ranks,
        **modelled_options(ds_config),
    )
