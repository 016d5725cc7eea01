"""How long plans take to make, model by model and budget by budget.

    python benchmarks/planning_time.py --out benchmarks/planning_time_2026-11-25

Passes of batch 1 and 1,024 tokens, with ``split``, for the profile of an A100. Seconds are those of
planning alone, without the capture, on a machine that does nothing else. Budgets are shares of all
that a pass needs. Exit status 1 if a plan takes longer than its bound.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass

from planned_page import command_of, keep, options_of, table, versions_used

from ds_finepage.graph.profiles import load_profile
from ds_finepage.whatif import capture_model, plan_captured

HARDWARE, TOKENS = "a100-80gb", 1024
PERCENTS = (10, 50, 90)
MODELS = {"llama-7b": 1.0, "llama-65b": 3.0, "llama-3.1-405b": 5.0}
"""The longest time of a plan of policy ``finepage``, in seconds."""

OTHERS = {"lru": 10.0, "horizon": 10.0}
"""That of other policies, for the decode step of one model."""
MODEL_OF_OTHERS = "llama-65b"


@dataclass(frozen=True, slots=True)
class Row:
    """Plans of one pass, by budget."""

    model: str
    phase: str
    policy: str
    seconds: tuple[float, ...]
    over_bound: tuple[float, ...]
    most_seconds: float


def row_of(model: str, phase: str, policy: str, most_seconds: float) -> Row:
    """Plan a pass under each budget."""
    profile = load_profile(HARDWARE)
    captured = capture_model(model, phase=phase, batch=1, seq=TOKENS, profile=profile)
    needed = captured.needs.needed_budget_bytes
    figures = [
        plan_captured(
            captured,
            budget_bytes=needed * percent // 100,
            profile=profile,
            policy=policy,
            split=True,
        ).figures
        for percent in PERCENTS
    ]
    return Row(
        model,
        phase,
        policy,
        tuple(f.plan_seconds for f in figures),
        tuple(f.predicted_ns / f.lower_bound_ns for f in figures),
        most_seconds,
    )


def main(arguments: list[str]) -> int:
    """Plan all passes, and write the page."""
    options = options_of(arguments, __doc__, list(MODELS))
    rows = []
    for model in options.models.split(","):
        cases = [(phase, "finepage", MODELS[model]) for phase in ("prefill", "decode")]
        if model == MODEL_OF_OTHERS:
            cases += [("decode", policy, most) for policy, most in OTHERS.items()]
        for phase, policy, most_seconds in cases:
            rows.append(row_of(model, phase, policy, most_seconds))
            print(*cells(rows[-1]), sep=" | ", flush=True)
    command = command_of("planning_time.py", arguments)
    versions = ", ".join(f"{name} {number}" for name, number in versions_used().items())
    lines = [f"# Seconds to plan on one core, {versions}", "", f"    {command}", ""]
    lines += [f"Simulated hardware: `{HARDWARE}`. Nothing else ran on the machine.", ""]
    shares = ", ".join(f"{percent}%" for percent in PERCENTS)
    heads = (
        "model",
        "pass",
        "policy",
        f"seconds at {shares}",
        "bound",
        "time / bound of the plans",
    )
    lines += table(heads, map(cells, rows))
    summary = [{**asdict(row), "holds": max(row.seconds) <= row.most_seconds} for row in rows]
    return keep(options.out, command, "\n".join(lines) + "\n", summary, [])


def cells(row: Row) -> list[str]:
    """Return a line of the table."""
    return [
        row.model,
        row.phase,
        f"`{row.policy}`",
        ", ".join(f"{s:.2f}" for s in row.seconds),
        f"<= {row.most_seconds:g}",
        ", ".join(f"{ratio:.3f}" for ratio in row.over_bound),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
