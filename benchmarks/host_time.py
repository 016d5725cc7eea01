"""What a decode step costs the host, beside plain transformers in the same process, on the CPU.

    python benchmarks/host_time.py --out benchmarks/host_time_2026-11-21.json

Two figures a model: the time of a step over that of plain transformers where everything fits, and
at a budget of 25% of what the model needs, with the copies of weights left out, the time a task
takes beyond a step that fits. All three run in turns; medians over the rounds, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

from ds_finepage.api import attach
from ds_finepage.execution import bound_plan

ROUNDS = 15
STEPS = 60
MODELS = {"2 layers of 128": (128, 2), "4 layers of 256": (256, 4), "4 layers of 512": (512, 4)}


def make_model(hidden: int, layers: int) -> Any:
    """Make a small Llama of random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    return transformers.LlamaForCausalLM(config).eval()


def step_seconds(model: Any) -> float:
    """Return the median time of a decode step."""
    seconds = []
    with torch.no_grad():
        out = model(torch.arange(1, 17)[None], use_cache=True)
        for _ in range(STEPS):
            token = out.logits[:, -1:].argmax(-1)
            start = time.perf_counter()
            out = model(token, past_key_values=out.past_key_values, use_cache=True)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[STEPS // 4 :])


def copy_nothing(target: torch.Tensor, master: torch.Tensor) -> None:
    """Stand in for the copy of a weight."""


def measure(hidden: int, layers: int) -> dict[str, Any]:
    """Measure one model: plain, where it fits, and paged, in turns.

    Other programs on the machine change how fast it is, from one minute to the next. So the
    figures are of steps that were measured side by side, and their spread is told beside them.
    """
    models = {name: make_model(hidden, layers) for name in ("plain", "fits", "paged")}
    handles = [attach(models[n], device_budget="1GiB", device="cpu") for n in ("fits", "paged")]
    for name in ("fits", "paged"):
        step_seconds(models[name])
    stats = handles[1].stats
    num_tasks = max(stats.passes, key=lambda p: p.num_runs).num_tasks
    budget = max(stats.min_budget_bytes, stats.needed_budget_bytes // 4)
    handles[1].replan(budget_bytes=budget)
    step_seconds(models["paged"])  # with copies, so that there are weights where weights belong
    with mock.patch.object(bound_plan, "copy_master", copy_nothing):
        rounds = [{n: step_seconds(model) for n, model in models.items()} for _ in range(ROUNDS)]
    for handle in handles:
        handle.detach()
    ratios = statistics.quantiles(r["fits"] / r["plain"] for r in rounds)
    beyond = statistics.quantiles((r["paged"] - r["fits"]) / num_tasks * 1e6 for r in rounds)
    return {
        "tasks": num_tasks,
        "plain_ms": statistics.median(r["plain"] for r in rounds) * 1e3,
        "fits_over_plain": ratios[1],
        "fits_over_plain_quartiles": [ratios[0], ratios[2]],
        "fastest_fits_over_fastest_plain": min(r["fits"] for r in rounds)
        / min(r["plain"] for r in rounds),
        "paged_us_a_task": beyond[1],
        "paged_us_a_task_quartiles": [beyond[0], beyond[2]],
    }


def main() -> None:
    """Measure all models and print them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    found: dict[str, Any] = {name: version(name) for name in ("torch", "transformers")}
    for name, (hidden, layers) in MODELS.items():
        torch._dynamo.reset()
        found[name] = measure(hidden, layers)
        print(name, found[name], flush=True)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
