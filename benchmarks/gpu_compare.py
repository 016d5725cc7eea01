"""One command that compares every engine on a GPU, and holds the results against the targets.

    python benchmarks/gpu_compare.py --out FOLDER
    python benchmarks/gpu_compare.py --out FOLDER --device cpu --tiny

The tests marked ``gpu`` run first. Then all arms of ``ds-finepage compare`` run on random Llamas of
1B and 7B in bfloat16, under budgets of 25, 50, 75, 90 and 100%: a prefill of 2,048 and of 8,192
tokens, and decode steps behind it (day_compare.py). A budget is a part of the weights, and 100% is
the bytes that plain transformers takes. The last table holds the results against the targets.

It needs one CUDA device, no network, and under nine minutes. Steps, limits and files are those of
gpu_day.py. ``--tiny`` rehearses it, also on the CPU or on the test device.

Exit status: 0 if every step ended well, 1 if one did not. A target that is missed is in the table
alone. 2 for an option that cannot be used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import gpu_day
from gpu_day import Step

Cells = dict[str, Any]

NAME = "gpu_compare"
OURS, PLAIN, ZERO, PERSISTENCE = "finepage", "plain", "zero", "zero-persistence"
EVERYTHING = "100%"


def _compared(model: str, arms: str, limit_s: int) -> Step:
    words = ("day_compare.py", "--model", model, "--arms", arms)
    name, is_tiny = f"{model}, {arms}", model == "tiny"
    return Step(name=name, limit_s=limit_s, words=words, is_tiny=is_tiny)


STEPS = (
    Step(name="machine", limit_s=12, words=("day_machine.py",)),
    Step(name="tests", limit_s=75, words=("day_tests.py",)),
    _compared("tiny", "all", 60),
    _compared("1B", "ours", 55),
    _compared("1B", "zero", 55),
    _compared("7B", "ours", 150),
    _compared("7B", "zero", 115),
    _compared("1B", "hooks", 30),
    _compared("7B", "hooks", 45),
)


# The targets.


def targets_of(rows: Sequence[Cells]) -> list[Cells]:
    """Hold the rows of all arms against the targets.

    Args:
        rows: The rows of all steps.

    Returns:
        A row for each target, model, prompt and budget: what was found, the limit, and whether the
        target is met. A figure that is missing says so.
    """
    models = {row["model"]: row for row in rows if row["table"] == "models"}
    arms = {
        (row["model"], row["prompt"], row["budget"], row["engine"]): row
        for row in rows
        if row["table"] == "arms"
    }
    found: list[Cells] = []
    for (model, prompt, budget, engine), row in arms.items():
        if engine != OURS:
            continue
        others = {
            name: arms.get((model, prompt, budget if name == PERSISTENCE else "none", name), {})
            for name in (PLAIN, ZERO, PERSISTENCE)
        }
        for target, value, limit, is_least in _targets(row, models[model], others):
            cells: Cells = {"table": "targets", "model": model, "prompt": prompt, "budget": budget}
            is_met = None if value is None else value >= limit if is_least else value <= limit
            wanted = f"{'>=' if is_least else '<='} {limit:g}"
            verdict = {None: "not run", True: "yes", False: "NO"}[is_met]
            found.append(
                {**cells, "target": target, "found": value, "wanted": wanted} | {"met": verdict}
            )
    return found


def _targets(
    row: Cells, model: Cells, others: dict[str, Cells]
) -> Iterator[tuple[str, float | None, float, bool]]:
    """Yield each target of a row: its name, the figure, the limit, and whether more is better.

    Args:
        row: Of ds_finepage.
        model: The row of the model.
        others: The rows of other arms for the same prompt and budget; {} for one that did not run.
    """
    plain, zero, persistence = (others[name] for name in (PLAIN, ZERO, PERSISTENCE))
    budget = row["budget"]
    if "tokens_equal" in row:
        yield "tokens are those of plain", float(row["tokens_equal"]), 1, True
    yield "logits, off those of plain", row.get("logits_off"), 0.05, False
    yield "peak / budget", _ratio(row.get("peak_bytes"), row.get("budget_bytes")), 1, False
    if budget != EVERYTHING:
        yield "link rate / probe", row.get("link_over_probe"), 0.90, True
    reads_ms = _milliseconds(model.get("weights_bytes"), model.get("probe_memory_gb_per_s"))
    for part, device_ms, limit in (
        ("step", reads_ms, 1.10),
        ("prefill", plain.get("prefill_ms"), 1.15),
    ):
        copy_ms = _milliseconds(row.get(f"{part}_h2d_bytes"), model.get("probe_h2d_gb_per_s"))
        least_ms = None if copy_ms is None or device_ms is None else max(copy_ms, device_ms)
        yield f"{part}, time / least time", _ratio(row.get(f"{part}_ms"), least_ms), limit, False
    for part in ("step", "prefill"):
        key = f"{part}_ms"
        predicted = _ratio(row.get(f"{part}_predicted_ms"), row.get(key))
        error = None if predicted is None else abs(predicted - 1)
        yield f"{part}, error of the prediction", error, 0.10, False
        gain = _ratio(persistence.get(key), row.get(key))
        yield f"{part}, speed / zero-persistence", gain, 1, True
        if budget == EVERYTHING:
            yield f"{part}, time / plain", _ratio(row.get(key), plain.get(key)), 1.02, False
    gains = {"50%": 1.9, "90%": 5.0}
    if budget in gains:
        gain = _ratio(zero.get("step_ms"), row.get("step_ms"))
        yield "step, speed / zero", gain, gains[budget], True


def _ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def _milliseconds(nbytes: int | None, gb_per_s: float | None) -> float | None:
    """Return the time of some bytes at a rate."""
    return None if nbytes is None or not gb_per_s else nbytes / gb_per_s / 1e6


def main(words: Sequence[str] | None = None) -> int:
    """Run the comparison; return the exit status."""
    options = gpu_day.parse(words, STEPS, __doc__)
    for path in options.out.glob("plain_*.pt"):  # of an earlier day
        path.unlink()
    report = gpu_day.run_day(
        options, options.steps, name=NAME, title="All engines", judge=targets_of
    )
    tables = gpu_day.tables_of(report.rows)
    for name in ("arms", "targets"):
        print(f"\n{gpu_day.table_of(tables.get(name, []))}", end="")
    print(f"report: {report.path('md').name}, {report.path('json').name}")
    return 0 if all(o.status == gpu_day.OK for o in report.outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
