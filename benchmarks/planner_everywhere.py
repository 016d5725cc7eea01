"""Holds policy finepage against every other policy: other families, least and full budgets.

    python benchmarks/planner_everywhere.py --out benchmarks/planner_everywhere_2026-11-26.jsonl

A case is a model, a phase, a batch and a budget. Each policy that can run plans it, finepage also
without cutting weights. Each plan is appended to the file as one line, and a plan that the file has
is not made again. So a run may be ended and started again, and ``--arms`` makes some plans only.
At the end the cases are told: finepage's predicted time over the best other one's, and over the
lower bound of time. Nothing here depends on the machine that it runs on but ``plan_seconds``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import transformers
from planned_page import table

from ds_finepage.errors import FinepageError, PlanInfeasibleError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import Lane, MemGraph
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.simulator import simulate
from ds_finepage.whatif import CapturedModel, capture_model, plan_captured

CONFIGS = {
    "gpt2": (transformers.GPT2Config, 1024),
    "bert": (transformers.BertConfig, 512),
    "t5-base": (transformers.T5Config, 512),
    "whisper": (transformers.WhisperConfig, 448),
}
"""Models of small size by the defaults of transformers, with the tokens that they can hold."""

SHIPPED = {
    name: 1024 for name in ("llama-7b", "mixtral-8x7b", "qwen3-32b", "qwen3-30b-a3b", "llama-65b")
}
EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b")
PERCENTS = (5, 10, 25, 50, 75, 90, 95, 97, 99, 100, 102)
ARMS = {
    "finepage": ("finepage", True),
    "whole": ("finepage", False),
    "horizon": ("horizon", False),
    "static": ("static", False),
    "zero-persistence": ("zero-persistence", False),
}
"""Policies, and whether they may cut weights."""

OWN = "finepage"
"""The arm that is held against the others."""

BUSY = ("host", "link", "device")
"""Each of them is busy for a part of a pass; the bound of time is that of the busiest one."""

MOST_TASKS = 8000
"""Of a pass that policy horizon, which takes long, plans."""

SLOWER, MOST_DENSE, MOST_EXPERTS, NEAR_LEAST = 1.005, 1.05, 1.10, 1.1
"""The bounds: over the best other policy, over the lower bound, and from which budget on."""

Case = tuple[str, str, int, float]
Line = dict[str, Any]


def case_of(line: Line) -> Case:
    """Return the case of a plan: model, phase, batch, percent."""
    return line["model"], line["phase"], line["batch"], line["percent"]


def planned(captured: CapturedModel, budget_bytes: int, profile: HardwareProfile, arm: str) -> Line:
    """Plan one case by one policy, finepage with the KV cache in the place where it is faster.

    Returns:
        The figures of the plan; why there are none if it cannot run.
    """
    policy, split = ARMS[arm]
    if policy == "horizon" and len(captured.graph.tasks) > MOST_TASKS:
        return {"left_out": "too many tasks"}
    plans = []
    for place in ("auto", "host") if policy == "finepage" else ("auto",):
        with contextlib.suppress(PlanInfeasibleError):
            plans.append(
                plan_captured(
                    captured,
                    budget_bytes=budget_bytes,
                    profile=profile,
                    policy=policy,
                    split=split,
                    kv_cache=place,
                )
            )
    if not plans:
        return {"left_out": "no room"}
    found = min(plans, key=lambda plan: plan.figures.predicted_ns)
    figures = found.figures
    return {
        "predicted_ns": figures.predicted_ns,
        "lower_bound_ns": figures.lower_bound_ns,
        "budget_over_least": round(budget_bytes / figures.min_budget_bytes, 3),
        "reloaded_bytes": figures.reloaded_bytes,
        "offloaded_bytes": figures.offloaded_bytes,
        "lower_bound_bytes": figures.lower_bound_bytes,
        "kv_on_host": figures.kv_on_host,
        "nodes_a_task": round(len(found.memgraph.nodes) / len(captured.graph.tasks), 2),
        "plan_seconds": round(sum(plan.figures.plan_seconds for plan in plans), 2),
        **(work_of(found.memgraph, len(captured.graph.tasks), profile) if arm == OWN else {}),
    }


def work_of(plan: MemGraph, num_captured: int, profile: HardwareProfile) -> Line:
    """Tell how long a pass keeps the host, the links and the device busy, and with what.

    Args:
        plan: The plan of a pass.
        num_captured: Tasks of the pass as it was captured.
        profile: The machine.
    """
    timeline, num_tasks = simulate(plan, profile), len(plan.graph.tasks)
    copies = [n for n in plan.nodes if n.task is None and plan.lane_of(n) in (Lane.H2D, Lane.D2H)]
    num_copies = sum(map(plan.copies_at, copies))
    return {
        "num_copies": num_copies,
        "num_added_tasks": num_tasks - num_captured,
        "host_ns": num_tasks * profile.host_op_ns + num_copies * profile.host_copy_ns,
        "link_ns": timeline.transfer_ns,
        "device_ns": timeline.compute_ns,
    }


def models(names: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Yield names of models, what to capture, and how many tokens."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            if name in SHIPPED:
                yield name, name, SHIPPED[name]
                continue
            make, tokens = CONFIGS[name]
            path = Path(folder, f"{name}.json")
            path.write_text(make().to_json_string(use_diff=False), encoding="utf-8")
            yield name, str(path), tokens


def missing(arguments: argparse.Namespace, known: set[tuple[Case, str]]) -> Iterator[Line]:
    """Make the plans that are not known."""
    profile = load_profile(arguments.hardware)
    percents, arms = map_of(float, arguments.percents), arguments.arms.split(",")
    for name, where, tokens in models(arguments.models.split(",")):
        for phase in arguments.phases.split(","):
            for batch in map_of(int, arguments.batch):
                wanted = [
                    (percent, arm)
                    for percent in percents
                    for arm in arms
                    if ((name, phase, batch, percent), arm) not in known
                ]
                if not wanted:
                    continue
                try:
                    captured = capture_model(
                        where, phase=phase, batch=batch, seq=tokens, profile=profile
                    )
                except FinepageError as error:
                    print(f"{name} {phase} {batch}: {error}", file=sys.stderr)
                    continue
                for percent, arm in wanted:
                    budget_bytes = int(captured.needs.needed_budget_bytes * percent / 100)
                    yield {
                        "model": name,
                        "phase": phase,
                        "batch": batch,
                        "percent": percent,
                        "arm": arm,
                        **planned(captured, budget_bytes, profile, arm),
                    }


def map_of(kind: Any, values: str) -> list[Any]:
    """Read values with commas between them."""
    return [kind(value) for value in values.split(",")]


def cases_of(lines: Iterable[Line]) -> list[Line]:
    """Sum up the plans of each case that finepage can run."""
    grouped: dict[Case, dict[str, Line]] = {}
    for line in lines:
        if "predicted_ns" in line:
            grouped.setdefault(case_of(line), {})[line["arm"]] = line
    found = []
    for arms in grouped.values():
        own = arms.pop(OWN, None)
        if own is None:
            continue
        times = {arm: other["predicted_ns"] for arm, other in arms.items()}
        best = min(times, key=lambda arm: times[arm], default="none")
        found.append(
            {
                **own,
                "best_other": best,
                "over_best_other": own["predicted_ns"] / times.get(best, 10**18),
                "over_bound": own["predicted_ns"] / own["lower_bound_ns"],
            }
        )
    return found


def misses(case: Line) -> list[str]:
    """List the bounds that a case misses."""
    most = MOST_EXPERTS if case["model"] in EXPERTS else MOST_DENSE
    found = []
    if case["over_best_other"] > SLOWER:
        found.append(f"{case['over_best_other']:.3f} x {case['best_other']}")
    if case["over_bound"] > most and case["budget_over_least"] >= NEAR_LEAST:
        found.append(f"{case['over_bound']:.3f} x the bound")
    return found


def reason(case: Line) -> tuple[str, str, str, str]:
    """Tell what a pass spends its time on, if its plan says so.

    Returns:
        The busiest part and its share of the time, the reloaded bytes over the fewest, the copies
        and the tasks that the plan adds.
    """
    if "host_ns" not in case:
        return ("", "", "", "")
    busiest = max(BUSY, key=lambda name: case[f"{name}_ns"])
    share = case[f"{busiest}_ns"] / case["predicted_ns"]
    over = case["reloaded_bytes"] / max(1, case["lower_bound_bytes"])
    added = case["num_added_tasks"]
    return f"{busiest} {share:.2f}", f"{over:.2f}", str(case["num_copies"]), str(added)


def report(lines: Iterable[Line]) -> tuple[str, int]:
    """Return the page of some plans, and the number of cases that miss a bound."""
    cases = cases_of(lines)
    groups: dict[tuple[str, str, int], list[Line]] = {}
    for case in cases:
        groups.setdefault(case_of(case)[:3], []).append(case)
    rows = []
    for (model, phase, batch), each in groups.items():
        room = [c for c in each if c["budget_over_least"] >= NEAR_LEAST] or each
        slow = max(room, key=lambda c: c["over_bound"])
        beaten = max(each, key=lambda c: c["over_best_other"])
        rows.append(
            (
                model,
                phase,
                str(batch),
                f"{min(c['percent'] for c in each):g} to {max(c['percent'] for c in each):g}%",
                f"{median(c['over_bound'] for c in room):.3f}",
                f"{slow['over_bound']:.3f} ({slow['percent']:g}%)",
                f"{beaten['over_best_other']:.3f} ({beaten['percent']:g}%, {beaten['best_other']})",
                f"{max(c['nodes_a_task'] for c in each):.1f}",
                f"{max(c['plan_seconds'] for c in each):.1f}",
                f"{sum(bool(misses(c)) for c in each)} of {len(each)}",
            )
        )
    headings: tuple[str, ...] = ("model", "phase", "batch", "budgets")
    headings += ("time / bound: median", "worst (at)")
    headings += ("over the best other policy: worst", "nodes a task", "plan s", "cases that miss")
    beyond = [case for case in cases if misses(case)]
    listed = (
        (
            *map(str, case_of(c)[:3]),
            f"{c['percent']:g}%",
            f"{c['budget_over_least']:g}",
            "; ".join(misses(c)),
            *reason(c),
        )
        for c in beyond
    )
    page = [f"{len(cases)} cases, {len(beyond)} miss a bound.", "", *table(headings, rows), ""]
    headings = ("model", "phase", "batch", "budget", "x least", "misses")
    headings += ("busiest", "bytes / fewest", "copies", "added tasks")
    page += table(headings, listed)
    return "\n".join(page), len(beyond)


def main() -> int:
    """Make the plans and tell about them; exit status 1 if a case misses a bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join([*CONFIGS, *SHIPPED]))
    parser.add_argument("--phases", default="prefill,decode")
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--percents", default=",".join(map(str, PERCENTS)))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--hardware", default="a100-80gb")
    parser.add_argument("--out", type=Path, required=True, help="a line for each plan")
    arguments = parser.parse_args()
    lines: list[Line] = []
    if arguments.out.exists():
        lines = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    known = {(case_of(line), line["arm"]) for line in lines}
    with arguments.out.open("a", encoding="utf-8") as file:
        for line in missing(arguments, known):
            lines.append(line)
            print(json.dumps(line), file=file, flush=True)
    page, num_misses = report(lines)
    print(page)
    return 1 if num_misses else 0


if __name__ == "__main__":
    sys.exit(main())
