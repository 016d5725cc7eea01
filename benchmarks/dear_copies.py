"""How plans bear copies that cost more than their profile says.

    python benchmarks/dear_copies.py --out benchmarks/dear_copies_2026-11-26

Policy ``finepage`` plans each pass with the latency of the profile. The plan is then simulated with
10 us for the latency of each copy, and with 10 us more than the profile has. Other plans are made
for these latencies: they tell how much of the time is the number of copies, and how much any plan
takes. Nothing here depends on the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter

from budget_steps import Line, Pass, options_of_passes, pass_of
from planned_page import table
from planner_everywhere import models

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.memgraph import Lane, MemGraph
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.simulator import predicted_ns
from ds_finepage.whatif import CapturedModel, capture_model, plan_captured

DEAR_NS = 10_000
FIGURES = {
    "at_10_us": "at 10 us a copy / predicted",
    "at_10_us_over_own_plan": "at 10 us a copy / plan made for that",
    "with_10_us_more": "with 10 us more / predicted",
    "with_10_us_more_over_own_plan": "with 10 us more / plan made for that",
}
"""The figures of a line, and the heads of their columns."""

PERCENTS = (5, 10, 25, 50, 75, 90, 95)


def with_latency(profile: HardwareProfile, latency_ns: int) -> HardwareProfile:
    """Return a machine whose copies to the device cost so much beside their bytes."""
    return replace(profile, transfer_latency_ns=latency_ns)


def time_ns(plan: MemGraph, profile: HardwareProfile) -> int:
    """Return the predicted time of a plan."""
    return predicted_ns(plan, profile)


def num_copies(plan: MemGraph) -> int:
    """Count the copies to the device in a pass."""
    return sum(plan.lane_of(node) is Lane.H2D for node in plan.nodes)


def line_of(captured: CapturedModel, percent: int, profile: HardwareProfile) -> Line:
    """Plan a pass under a budget, for all latencies; without figures if it cannot run."""
    budget_bytes = captured.needs.needed_budget_bytes * percent // 100
    dear = {
        "at_10_us": with_latency(profile, DEAR_NS),
        "with_10_us_more": with_latency(profile, profile.transfer_latency_ns + DEAR_NS),
    }

    def planned(machine: HardwareProfile) -> MemGraph:
        return plan_captured(captured, budget_bytes=budget_bytes, profile=machine).memgraph

    try:
        mine = planned(profile)
        theirs = {name: planned(machine) for name, machine in dear.items()}
    except PlanInfeasibleError:
        return {}
    predicted = time_ns(mine, profile)
    line: Line = {"predicted_ns": predicted, "copies": num_copies(mine)}
    for name, machine in dear.items():
        mine_ns = time_ns(mine, machine)
        line[name] = round(mine_ns / predicted, 4)
        line[f"{name}_over_own_plan"] = round(mine_ns / time_ns(theirs[name], machine), 4)
    return line


def lines_of(arguments: argparse.Namespace) -> Iterator[Line]:
    """Plan all passes."""
    profile = load_profile(arguments.hardware)
    for model, where, tokens in models(arguments.models.split(",")):
        for phase in arguments.phases.split(","):
            for batch in map(int, arguments.batch.split(",")):
                captured = capture_model(
                    where, phase=phase, batch=batch, seq=tokens, profile=profile
                )
                for percent in PERCENTS:
                    key = {"model": model, "phase": phase, "batch": batch, "percent": percent}
                    yield {**key, **line_of(captured, percent, profile)}


def rows_of(lines: list[Line]) -> list[tuple[str, ...]]:
    """Return a row of the table for each pass: the largest figures, and their budgets."""
    passes: dict[Pass, list[Line]] = {}
    for line in lines:
        if "predicted_ns" in line:
            passes.setdefault(pass_of(line), []).append(line)
    rows = []
    for (model, phase, batch), each in passes.items():
        most = max(each, key=itemgetter("copies"))
        told = []
        for name in FIGURES:
            worst = max(each, key=itemgetter(name))
            told.append(f"{worst[name]:.3f} ({worst['percent']}%, {worst['copies']})")
        rows.append((model, phase, str(batch), f"{most['copies']} ({most['percent']}%)", *told))
    return rows


def main() -> int:
    """Make the plans, and print the table."""
    arguments = options_of_passes(__doc__.splitlines()[0], "1,16")
    lines: list[Line] = []
    with arguments.out.with_suffix(".jsonl").open("w", encoding="utf-8") as file:
        for line in lines_of(arguments):
            lines.append(line)
            print(json.dumps(line), file=file, flush=True)
    heads = ("model", "phase", "batch", "most copies", *FIGURES.values())
    print(*table(heads, rows_of(lines)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
