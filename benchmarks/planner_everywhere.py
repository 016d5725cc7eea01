"""Holds policy finepage against every other policy: other families, least and full budgets.

    python benchmarks/planner_everywhere.py --out benchmarks/planner_everywhere_2026-11-22.json

A case is a model, a phase, a batch and a budget. Each policy that can run plans it, finepage also
without cutting weights. Told are finepage's predicted time over the best other one's, and over the
lower bound of time. Nothing here depends on the machine that it runs on but ``plan_seconds``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import transformers

from ds_finepage.errors import FinepageError, PlanInfeasibleError
from ds_finepage.graph.profiles import load_profile
from ds_finepage.whatif import CapturedModel, PlannedModel, capture_model, plan_captured

CONFIGS = {
    "gpt2": (transformers.GPT2Config, 1024),
    "bert": (transformers.BertConfig, 512),
    "t5-base": (transformers.T5Config, 512),
    "whisper": (transformers.WhisperConfig, 448),
}
"""Models of small size by the defaults of transformers, with the tokens that they can hold."""

SHIPPED = {
    name: 1024 for name in ("llama-7b", "llama-65b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-32b")
}
PERCENTS = (5, 10, 25, 50, 75, 90, 95, 97, 99, 100, 102)
OTHERS = ("horizon", "static", "zero-persistence")
MOST_TASKS = 8000
"""Of a pass that policy horizon, which takes long, plans."""


def arms(captured: CapturedModel, budget_bytes: int, hardware: str) -> dict[str, PlannedModel]:
    """Plan a case by each policy that can."""
    found = {}
    choices = [("finepage", "finepage", True), ("whole", "finepage", False)]
    for name, policy, split in [*choices, *((name, name, False) for name in OTHERS)]:
        if name == "horizon" and len(captured.graph.tasks) > MOST_TASKS:
            continue
        try:
            found[name] = plan_captured(
                captured,
                budget_bytes=budget_bytes,
                profile=load_profile(hardware),
                policy=policy,
                split=split,
            )
        except PlanInfeasibleError:
            continue
    return found


def measure(captured: CapturedModel, percent: float, hardware: str) -> dict[str, Any] | None:
    """Plan one case; None if nothing fits."""
    budget_bytes = int(captured.needs.needed_budget_bytes * percent / 100)
    found = arms(captured, budget_bytes, hardware)
    if "finepage" not in found:
        return None
    own = found.pop("finepage")
    times = {name: planned.figures.predicted_ns for name, planned in found.items()}
    nodes = own.memgraph.nodes
    return {
        "model": captured.model,
        "phase": captured.phase,
        "batch": captured.batch,
        "percent": percent,
        "budget_over_least": budget_bytes / own.figures.min_budget_bytes,
        "predicted_ns": own.figures.predicted_ns,
        "over_bound": own.figures.predicted_ns / own.figures.lower_bound_ns,
        "over_best_other": own.figures.predicted_ns / min(times.values(), default=10**18),
        "others_ns": times,
        "bytes_over_bound": own.figures.reloaded_bytes / max(1, own.figures.lower_bound_bytes),
        "offloaded_bytes": own.figures.offloaded_bytes,
        "nodes_a_task": len(nodes) / len(captured.graph.tasks),
        "plan_seconds": own.figures.plan_seconds,
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


def cases(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure all cases."""
    for name, where, tokens in models(arguments.models.split(",")):
        for phase in arguments.phases.split(","):
            for batch in map(int, arguments.batch.split(",")):
                try:
                    captured = capture_model(
                        where,
                        phase=phase,
                        batch=batch,
                        seq=tokens,
                        profile=load_profile(arguments.hardware),
                    )
                except FinepageError as error:
                    print(f"{name} {phase} {batch}: {error}", file=sys.stderr)
                    continue
                for percent in map(float, arguments.percents.split(",")):
                    case = measure(captured, percent, arguments.hardware)
                    if case is not None:
                        yield {**case, "model": name}


def main() -> int:
    """Run the cases; exit status 1 if another policy beats finepage by more than half a percent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join([*CONFIGS, *SHIPPED]))
    parser.add_argument("--phases", default="prefill,decode")
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--percents", default=",".join(map(str, PERCENTS)))
    parser.add_argument("--hardware", default="a100-80gb")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = []
    for case in cases(arguments):
        found.append(case)
        best = min(case["others_ns"], key=case["others_ns"].get, default="")
        print(
            f"{case['model']:14} {case['phase']:8} {case['batch']:3} {case['percent']:5g}% "
            f"bound x {case['over_bound']:.3f}  best other x {case['over_best_other']:.3f} "
            f"({best})  bytes x {case['bytes_over_bound']:.3f}  "
            f"offloaded {case['offloaded_bytes']}  nodes {case['nodes_a_task']:.1f}  "
            f"{case['plan_seconds']:.1f} s",
            flush=True,
        )
    if arguments.out is not None:
        versions = {name: version(name) for name in ("torch", "transformers")}
        document = {"versions": versions, "hardware": arguments.hardware, "cases": found}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 1 if any(case["over_best_other"] > 1.005 for case in found) else 0


if __name__ == "__main__":
    sys.exit(main())
