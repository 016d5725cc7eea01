"""Works out what a report shows beside the figures of its runs: winners, and other policies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_finepage.compare.arms import ARMS, OURS
from ds_finepage.compare.judge import winners
from ds_finepage.errors import ConfigError, FinepageError
from ds_finepage.graph import codec
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import MemGraph
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.pipeline import PlanSettings, plan_checked
from ds_finepage.planning.simulator import simulate
from ds_finepage.reporting.findings import (
    PROFILE_FILE,
    BudgetLine,
    Findings,
    MemoryRow,
    memory_row,
    refused_row,
)
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
    num_budgets: int = 0,
    progress: Progress = iter,
) -> Findings:
    """Name the winners, plan the passes of our runs by other policies, and plan under more budgets.

    Args:
        folder: The folder of the results.
        results: The results.
        passes: Run name -> its observed passes.
        num_budgets: Budgets to plan beside the compared one; 0 leaves the picture out.
        progress: Goes through the budgets, and shows it.

    Raises:
        InvalidPlanError: The profile in the folder is damaged.
    """
    if results.settings is None:
        return _of_one_run(folder, results, passes)
    remarks: dict[str, None] = {}
    simulated, curves = {}, {}
    for batch in dict.fromkeys(run.batch for run in results.runs):
        ours = [run for run in results.runs if run.batch == batch and run.arm == OURS]
        ours = [run for run in ours if passes.get(run.name)]
        if not ours and not num_budgets:
            continue
        try:
            modeller = modeller_in(folder, results, batch)
            for run in ours:
                simulated[run.name] = planned_by(modeller, [OURS, best_other(results, run), PAGING])
            if num_budgets:
                curves[batch] = budget_lines(modeller, num_budgets, progress)
        except FinepageError as error:
            remarks[f"There are no pictures of other policies and budgets: {error}"] = None
    return Findings(
        sentences=sentences(results),
        fastest=frozenset(fastest(results)),
        hardware=load_profile(results.settings.hardware).name,
        passes=simulated,
        curves=curves,
        remarks=tuple(remarks),
    )


def _of_one_run(
    folder: Path, results: Results, passes: Mapping[str, Sequence[ObservedPass]]
) -> Findings:
    """Plan the passes of a single run by other policies, with the rates of its machine."""
    path = folder / PROFILE_FILE
    if not path.exists():
        return Findings()
    profile = codec.load(path, HardwareProfile)
    simulated = {
        run.name: {
            found.name: beside(found.memgraph, [BASELINE, PAGING], profile)
            for found in passes[run.name]
            if found.name in (PREFILL, DECODE)
        }
        for run in results.runs
        if run.arm == OURS and passes.get(run.name)
    }
    return Findings(hardware=profile.name, passes=simulated)


# Winners.


def sentences(results: Results) -> tuple[str, ...]:
    """Say who wins each batch, and why."""
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
    batches = dict.fromkeys(run.batch for run in results.runs)
    won = (winner for batch in batches for winner in winners(results, batch))
    return [winner.run.name for winner in won if winner.part == "decode step"]


def best_other(results: Results, ours: Run) -> str:
    """Return the policy of the fastest other system with this batch and budget that has plans."""
    timed = [
        (ns, ARMS[run.arm].policy)
        for run in results.runs
        if run.batch == ours.batch and run.arm in ARMS and run.holds_budget
        if ARMS[run.arm].policy and not ARMS[run.arm].is_ours
        if (ns := results.time_of(run.decode)) is not None
    ]
    return min(timed, default=(0, BASELINE))[1]


# Other policies.


def beside(
    memgraph: MemGraph, policies: Sequence[str], profile: HardwareProfile
) -> list[MemoryRow]:
    """Simulate a plan, and plans of the same pass by other policies in the same arena.

    Args:
        memgraph: The plan, with measured times of ops.
        policies: The other policies.
        profile: The machine that ran the plan.
    """
    found = [memory_row(memgraph, simulate(memgraph, profile, entry_missing=memgraph.lost))]
    for policy in policies:
        settings = PlanSettings(
            policy=policy, split=False, alignment=memgraph.alignment, profile=profile
        )
        try:
            planned = plan_checked(memgraph.graph, memgraph.arena_bytes, settings)
        except FinepageError as error:
            found.append(refused_row(policy, error))
        else:
            found.append(memory_row(planned.memgraph, planned.timeline))
    return found


def planned_by(modeller: Any, policies: Sequence[str]) -> dict[str, list[MemoryRow]]:
    """Plan the prefill and the decode step by several policies, as the table of runs does.

    Args:
        modeller: Of the batch and the budget.
        policies: The policies.
    """
    found: dict[str, list[MemoryRow]] = {PREFILL: [], DECODE: []}
    for policy in policies:
        try:
            planned = modeller.planned(policy)
            rows = [memory_row(each.memgraph, each.timeline) for each in planned]
        except FinepageError as error:
            rows = [refused_row(policy, error)] * len(found)
        for plans, row in zip(found.values(), rows, strict=True):
            plans.append(row)
    return found


# Other budgets.


def budget_lines(modeller: Any, num_budgets: int, progress: Progress) -> dict[str, BudgetLine]:
    """Plan the decode step of a batch under several budgets.

    Args:
        modeller: Of the batch and the budget of the comparison.
        num_budgets: Budgets beside that one.
        progress: Goes through the budgets, and shows it.
    """
    times: dict[str, BudgetLine] = {policy: [] for policy in CURVE_POLICIES}
    step = (MOST_PERCENT - LEAST_PERCENT) / max(1, num_budgets - 1)
    percents = (LEAST_PERCENT + step * number for number in range(num_budgets))
    others = [modeller.at(f"{percent:.3f}%weights") for percent in percents]
    for each in progress([modeller, *others]):
        for policy in CURVE_POLICIES:
            times[policy].append((each.budget_bytes, decode_ns(each, policy)))
    return {policy: sorted(points) for policy, points in times.items()}


def decode_ns(modeller: Any, policy: str) -> int | None:
    """Return the modelled time of a decode step; None if the budget is too small."""
    try:
        time_ns = modeller.figures(policy)[1].modelled_ns
    except FinepageError:
        return None
    assert time_ns is None or isinstance(time_ns, int)
    return time_ns


def modeller_in(folder: Path, results: Results, batch: int) -> Any:
    """Capture the passes of a comparison again.

    Args:
        folder: The folder of the results.
        results: The results of a comparison.
        batch: Sequences in the batch.

    Raises:
        ConfigError: The model is not there any more.
        FinepageError: It cannot be captured.
    """
    from ds_finepage.compare.modelling import modeller_of  # imports torch
    from ds_finepage.compare.orchestrate import MODEL_FOLDER

    assert results.settings is not None
    model = Path(results.settings.model)
    model = model if model.is_dir() else folder / MODEL_FOLDER
    if not model.is_dir():
        raise ConfigError(f"the model is neither in {results.settings.model} nor in {model}")
    return modeller_of(model, results.settings, batch)
