"""What a KV cache costs that does not fit the card, predicted: no GPU, no weights.

    python benchmarks/kv_cache.py

For each shape, a decode step at budgets from "all fits" down: its time and bytes over their lower
bounds, which let any byte of weights and of the cache stay. And 40 steps of the budget of the first
shape, to see that more room never costs time.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.graph.profiles import load_profile
from ds_finepage.whatif import CapturedModel, capture_model, plan_captured

GIB = 1 << 30
SHAPES = (
    ("llama-3.1-8b", 8, 131_072, "a100-80gb", (140, 75, 60, 40, 12)),
    ("llama-3.1-8b", 4, 32_768, "t4", (15, 12, 8, 5, 3)),
    ("llama-3.1-70b", 16, 8_192, "h200", (140, 100, 60, 30, 10)),
    ("mixtral-8x7b", 32, 4_096, "a100-80gb", (75, 60, 40, 20, 8)),
)
NUM_STEPS = 40


def row(captured: CapturedModel, hardware: str, gib: float) -> tuple[list[str], float]:
    """Return the cells of a budget, and the seconds of a step."""
    profile = load_profile(hardware)
    try:
        planned = plan_captured(captured, budget_bytes=int(gib * GIB), profile=profile)
    except PlanInfeasibleError:
        return [f"{gib:g}", "no plan"], 0.0
    found = planned.figures
    seconds = found.predicted_ns / 1e9
    return [
        f"{gib:g}",
        f"{seconds:.3f}",
        f"{found.predicted_ns / found.lower_bound_ns:.3f}",
        f"{found.reloaded_bytes / GIB:.2f}",
        f"{found.reloaded_bytes / max(1, found.lower_bound_bytes):.3f}",
    ], seconds


def main() -> None:
    """Print a table for each shape, and the steps of the budget."""
    console, first = Console(), None
    for model, batch, seq, hardware, budgets in SHAPES:
        profile = load_profile(hardware)
        captured = capture_model(model, phase="decode", batch=batch, seq=seq, profile=profile)
        first = first or captured
        cache, weights = captured.kv_bytes / GIB, captured.graph.weight_bytes / GIB
        title = f"{model}, {batch} x {seq} on {hardware}: weights {weights:.1f}, cache {cache:.1f}"
        table = Table("GiB", "s", "over bound", "GiB copied", "over bound", title=title)
        for gib in budgets:
            table.add_row(*row(captured, hardware, gib)[0])
        console.print(table)
    assert first is not None
    all_gib = (first.kv_bytes + first.graph.weight_bytes) / GIB + 1
    steps = [all_gib * (NUM_STEPS - n) / NUM_STEPS for n in range(NUM_STEPS - 3)]
    times = [row(first, SHAPES[0][3], gib)[1] for gib in steps]
    slower = [later / now for now, later in zip(times, times[1:], strict=False) if now]
    console.print(f"{len(times)} budgets from {all_gib:.0f} GiB down: least step {min(slower):.3f}")
    console.print(" ".join(f"{t:.2f}" for t in times))


if __name__ == "__main__":
    main()
