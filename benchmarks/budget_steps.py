"""Looks for budgets under which a plan takes longer than one for less.

    python benchmarks/budget_steps.py --out benchmarks/budget_steps_2026-11-26

Policy ``finepage`` plans each pass in steps of 1% of all that it needs. A rise is a predicted time
of more than 1.001 times the least one at any smaller budget. Each plan is appended to the JSONL
file as one line, and a plan that the file has is not made again. Nothing here depends on the
machine that it runs on but ``plan_seconds``. Exit status 1 if a time rises.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from planned_page import table
from planner_everywhere import CONFIGS, models

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.hardware import HardwareProfile
from ds_finepage.graph.profiles import load_profile
from ds_finepage.whatif import CapturedModel, capture_model, plan_captured

MOST = 1.001
"""The largest time of a plan, over the least one at a smaller budget."""

PERCENTS = range(1, 103)
Pass = tuple[str, str, int]
Line = dict[str, Any]


def pass_of(line: Line) -> Pass:
    """Return the pass of a plan: model, phase, batch."""
    return line["model"], line["phase"], line["batch"]


def planned(captured: CapturedModel, percent: int, profile: HardwareProfile) -> Line:
    """Plan a pass under a budget; without figures if it cannot run."""
    budget_bytes = captured.needs.needed_budget_bytes * percent // 100
    try:
        found = plan_captured(captured, budget_bytes=budget_bytes, profile=profile).figures
    except PlanInfeasibleError:
        return {}
    return {
        "predicted_ns": found.predicted_ns,
        "lower_bound_ns": found.lower_bound_ns,
        "reloaded_bytes": found.reloaded_bytes,
        "kv_on_host": found.kv_on_host,
        "plan_seconds": round(found.plan_seconds, 2),
    }


def missing(arguments: argparse.Namespace, known: set[tuple[Pass, int]]) -> Iterator[Line]:
    """Make the plans that are not known."""
    profile = load_profile(arguments.hardware)
    for name, where, tokens in models(arguments.models.split(",")):
        for phase in arguments.phases.split(","):
            for batch in map(int, arguments.batch.split(",")):
                wanted = [p for p in PERCENTS if ((name, phase, batch), p) not in known]
                if not wanted:
                    continue
                captured = capture_model(
                    where, phase=phase, batch=batch, seq=tokens, profile=profile
                )
                for percent in wanted:
                    yield {
                        "model": name,
                        "phase": phase,
                        "batch": batch,
                        "percent": percent,
                        **planned(captured, percent, profile),
                    }


def rises(lines: Sequence[Line]) -> list[tuple[int, float]]:
    """List the budgets of a pass at which the time rises, and the factors.

    Args:
        lines: The plans of the pass.
    """
    found, least_ns = [], 0
    for line in sorted(lines, key=lambda line: line["percent"]):
        total_ns = line["predicted_ns"]
        if least_ns and total_ns > MOST * least_ns:
            found.append((line["percent"], total_ns / least_ns))
        least_ns = min(least_ns or total_ns, total_ns)
    return found


def report(lines: Sequence[Line]) -> tuple[list[str], int]:
    """Return the lines of the page, and the number of rises."""
    passes: dict[Pass, list[Line]] = {}
    for line in lines:
        if "predicted_ns" in line:
            passes.setdefault(pass_of(line), []).append(line)
    rows, num_rises = [], 0
    for (model, phase, batch), each in passes.items():
        found = rises(each)
        num_rises += len(found)
        budgets = f"{min(p['percent'] for p in each)} to {max(p['percent'] for p in each)}%"
        told = ", ".join(f"{percent}%: {factor:.4f}" for percent, factor in found) or "none"
        slowest = f"{max(p['plan_seconds'] for p in each):.1f}"
        rows.append((model, phase, str(batch), budgets, str(len(each)), told, slowest))
    heads = ("model", "phase", "batch", "budgets", "plans", "rises", "slowest plan, s")
    return table(heads, rows), num_rises


def options_of_passes(description: str, batch: str) -> argparse.Namespace:
    """Read the options of a benchmark that plans many passes.

    Args:
        description: Of the benchmark.
        batch: The default of the batches.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--models", default=",".join([*CONFIGS, "llama-7b"]))
    parser.add_argument("--phases", default="prefill,decode")
    parser.add_argument("--batch", default=batch)
    parser.add_argument("--hardware", default="a100-80gb")
    parser.add_argument("--out", type=Path, required=True, help="files without their endings")
    return parser.parse_args()


def main() -> int:
    """Make the plans and tell about them; exit status 1 if a time rises."""
    arguments = options_of_passes(__doc__.splitlines()[0], "1,4,16")
    path = arguments.out.with_suffix(".jsonl")
    lines: list[Line] = []
    if path.exists():
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    known = {(pass_of(line), line["percent"]) for line in lines}
    with path.open("a", encoding="utf-8") as file:
        for line in missing(arguments, known):
            lines.append(line)
            print(json.dumps(line), file=file, flush=True)
    page, num_rises = report(lines)
    num_plans = sum("predicted_ns" in line for line in lines)
    print(f"{num_plans} plans, {num_rises} rises.", "", *page, sep="\n")
    return 1 if num_rises else 0


if __name__ == "__main__":
    sys.exit(main())
