"""How close the planner comes to its lower bounds, without GPU and without weights.

    python benchmarks/planner_bounds.py --out benchmarks/planner_bounds_2026-11-21.json

Prints one row a case, and at the end the worst of each column beside its bound. The figures of
bytes and of predicted time depend on nothing but the versions of torch and transformers; seconds
are processor time of one core.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.bounds import lower_bound_bytes
from ds_finepage.whatif import CapturedModel, PlannedModel, capture_model, plan_captured

MODELS = ("llama-7b", "llama-65b", "llama-2-70b")
HARDWARE = ("t4", "v100-16gb", "h200")
PERCENTS = (10, 25, 50, 75, 90)
MOST = {"bytes": 1.02, "time": 1.05, "layout": 1.02}
MOST_SECONDS = {"llama-7b": 1.0, "llama-65b": 3.0, "llama-3.1-405b": 5.0}


@dataclass(frozen=True)
class Case:
    """One plan of policy finepage, and what horizon does with the same budget."""

    model: str
    phase: str
    percent: int
    hardware: str
    bytes: float  # reloaded over the lower bound for this arena
    offloaded_bytes: int
    time: float  # predicted over lower bound
    layout: float  # arena peak over the largest sum of live bytes
    plan_seconds: float
    capture_seconds: float
    horizon_bytes: float | None  # over ours; None: horizon has no plan, or was not asked
    horizon_time: float | None


def measure(captured: CapturedModel, percent: int, hardware: str, *, horizon: bool) -> Case:
    """Plan one case."""
    profile = load_profile(hardware)
    budget_bytes = captured.graph.weight_bytes * percent // 100
    planned = plan_captured(captured, budget_bytes=budget_bytes, profile=profile)
    figures, memgraph = planned.figures, planned.memgraph
    ran = (captured.on_host if figures.kv_on_host else None) or captured
    least_bytes = lower_bound_bytes(
        ran.graph, memgraph.arena_bytes, memgraph.alignment, may_cut=True
    )
    other: PlannedModel | None = None
    if horizon:
        try:
            other = plan_captured(
                captured, budget_bytes=budget_bytes, profile=profile, policy="horizon"
            )
        except PlanInfeasibleError:
            other = None  # a table in one piece does not fit
    return Case(
        model=captured.model,
        phase=captured.phase,
        percent=percent,
        hardware=hardware,
        bytes=figures.reloaded_bytes / least_bytes,
        offloaded_bytes=figures.offloaded_bytes,
        time=figures.predicted_ns / figures.lower_bound_ns,
        layout=figures.layout_overhead,
        plan_seconds=figures.plan_seconds,
        capture_seconds=figures.capture_seconds,
        horizon_bytes=other and other.figures.reloaded_bytes / figures.reloaded_bytes,
        horizon_time=other and other.figures.predicted_ns / figures.predicted_ns,
    )


def worst(cases: list[Case]) -> dict[str, float]:
    """Return the worst of each figure that has a bound; ratios to horizon count the least."""
    compared = [c for c in cases if c.horizon_bytes is not None]
    return {
        "bytes": max(c.bytes for c in cases),
        "time": max(c.time for c in cases),
        "layout": max(c.layout for c in cases),
        "offloaded_bytes": max(c.offloaded_bytes for c in cases),
        "least horizon_bytes": min((c.horizon_bytes or 0 for c in compared), default=1.0),
        "least horizon_time": min((c.horizon_time or 0 for c in compared), default=1.0),
    }


def table(cases: list[Case]) -> Table:
    """Show the cases."""
    found = Table("model", "phase", "budget", "hardware", "bytes/bound", "time/bound", "layout",
                  "plan s", "horizon bytes", "horizon time")  # fmt: skip
    for c in cases:
        found.add_row(
            c.model, c.phase, f"{c.percent}%", c.hardware, f"{c.bytes:.4f}", f"{c.time:.4f}",
            f"{c.layout:.4f}", f"{c.plan_seconds:.2f}",
            "-" if c.horizon_bytes is None else f"{c.horizon_bytes:.3f} x",
            "-" if c.horizon_time is None else f"{c.horizon_time:.3f} x",
        )  # fmt: skip
    return found


def main() -> int:
    """Run all cases; exit status 1 if one is beyond its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-horizon", action="store_true")
    parser.add_argument("--models", default=",".join(MODELS))
    arguments = parser.parse_args()
    cases: list[Case] = []
    for model in arguments.models.split(","):
        for phase in ("decode", "prefill"):
            captured = capture_model(
                model, phase=phase, batch=1, seq=2048, profile=load_profile("h200")
            )
            for percent in PERCENTS:
                for hardware in HARDWARE:
                    # What horizon moves does not depend on the machine; one of them is enough.
                    ask = hardware == "v100-16gb" and not arguments.no_horizon
                    cases.append(measure(captured, percent, hardware, horizon=ask))
                    print(f"\r{len(cases)} cases", end="", file=sys.stderr, flush=True)
    found = worst(cases)
    Console(width=120).print(table(cases))
    print(json.dumps(found, indent=2))
    if arguments.out is not None:
        versions = {name: version(name) for name in ("torch", "transformers")}
        document = {"versions": versions, "worst": found, "cases": [asdict(c) for c in cases]}
        arguments.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    slow = [c for c in cases if c.plan_seconds > MOST_SECONDS.get(c.model, 3.0)]
    beyond = [name for name, most in MOST.items() if found[name] > most]
    return 1 if slow or beyond or found["offloaded_bytes"] else 0


if __name__ == "__main__":
    sys.exit(main())
