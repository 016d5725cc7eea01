"""What it saves to bring in just the experts that a router chose, without GPU and without weights.

    python benchmarks/experts.py --out benchmarks/experts_2026-11-21

One row for each model, batch and budget, decode steps at 512 tokens: bytes that a steady step
reloads and its predicted time, with reloads that wait for the router and with all experts of a
layer brought in ahead, by the same planner. Of experts as many are counted as a step may use at
most (tokens of the step times experts of a token); where tokens agree, fewer are moved. Figures
depend on nothing but the versions of torch and transformers.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from unittest import mock

from ds_finepage.graph.profiles import load_profile
from ds_finepage.units import format_bytes
from ds_finepage.whatif import CapturedModel, PlannedModel, capture_model, plan_captured

MODELS = ("mixtral-8x7b", "qwen3-30b-a3b")
BATCHES = (1, 2, 4, 16)
PERCENTS = (25, 50, 75)
HARDWARE = "a100-80gb"
SEQ = 512


@dataclass(frozen=True)
class Case:
    """One decode step; bytes are those that a steady step reloads, times are predicted."""

    model: str
    batch: int
    percent: int
    num_routed: int  # weights whose reload waits for the router
    reloaded_bytes: int
    lower_bound_bytes: int
    predicted_ns: int
    ahead_bytes: int  # with all experts brought in ahead
    ahead_ns: int


def measure(captured: CapturedModel, percent: int) -> Case:
    """Plan one case in both ways."""
    profile = load_profile(HARDWARE)
    budget_bytes = captured.graph.weight_bytes * percent // 100

    def planned() -> PlannedModel:
        return plan_captured(captured, budget_bytes=budget_bytes, profile=profile)

    routed = planned()
    with mock.patch("ds_finepage.planning.finepage.search.wait_for_routes", lambda plan: plan):
        ahead = planned().figures
    return Case(
        model=captured.model,
        batch=captured.batch,
        percent=percent,
        num_routed=len(routed.memgraph.routed),
        reloaded_bytes=routed.figures.reloaded_bytes,
        lower_bound_bytes=routed.figures.lower_bound_bytes,
        predicted_ns=routed.figures.predicted_ns,
        ahead_bytes=ahead.reloaded_bytes,
        ahead_ns=ahead.predicted_ns,
    )


def report(cases: list[Case], versions: dict[str, str]) -> str:
    """Write the cases as a Markdown table."""
    command = shlex.join(["python", *sys.argv])
    lines = [
        "# Experts: reloads that wait for the router",
        "",
        f"{datetime.date.today()}, predicted for {HARDWARE}, bfloat16, decode at {SEQ} tokens; "
        + ", ".join(f"{name} {number}" for name, number in versions.items())
        + f". Command: `{command}`.",
        "",
        "| model | batch | budget, % of weights | reloaded a step | lower bound | all ahead "
        "| times fewer | step | step, all ahead |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for c in cases:
        lines.append(
            f"| {c.model} | {c.batch} | {c.percent} | {format_bytes(c.reloaded_bytes)} "
            f"| {format_bytes(c.lower_bound_bytes)} | {format_bytes(c.ahead_bytes)} "
            f"| {c.ahead_bytes / c.reloaded_bytes:.2f} | {c.predicted_ns / 1e6:.1f} ms "
            f"| {c.ahead_ns / 1e6:.1f} ms |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run all cases; exit status 1 where waiting for the router costs bytes or time."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    arguments = parser.parse_args()
    cases: list[Case] = []
    for model in arguments.models.split(","):
        for batch in BATCHES:
            captured = capture_model(
                model, phase="decode", batch=batch, seq=SEQ, profile=load_profile(HARDWARE)
            )
            for percent in PERCENTS:
                cases.append(measure(captured, percent))
                print(f"\r{len(cases)} cases", end="", file=sys.stderr, flush=True)
    versions = {name: version(name) for name in ("torch", "transformers")}
    text = report(cases, versions)
    print(text)
    if arguments.out is not None:
        document = {"versions": versions, "cases": [asdict(c) for c in cases]}
        arguments.out.with_suffix(".md").write_text(text, encoding="utf-8")
        out = arguments.out.with_suffix(".json")
        out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    # Times within a percent are the same time to the planner, which then takes fewer bytes.
    worse = [
        c for c in cases if c.reloaded_bytes > c.ahead_bytes or c.predicted_ns > 1.02 * c.ahead_ns
    ]
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
