"""What a decode step costs the host, beside plain transformers in the same process, on the CPU.

    python benchmarks/host_time.py --out benchmarks/host_time_2026-11-21.json

Two figures a model: the time of a step over that of plain transformers where everything fits, and
at a budget of 25% of what the model needs, with the copies of weights left out, the time a task
takes beyond a step that fits. Medians of five rounds, taken in turns.
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
from ds_finepage.execution import executor

ROUNDS = 5
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


def skip_copy(target: object, master: object) -> None:
    """Stand in for the copy of a weight."""


def measure(hidden: int, layers: int) -> dict[str, float]:
    """Measure one model."""
    model, plain = make_model(hidden, layers), make_model(hidden, layers)
    handle = attach(model, device_budget="1GiB", device="cpu")
    step_seconds(model)
    rounds = [(step_seconds(plain), step_seconds(model)) for _ in range(ROUNDS)]
    ratio = statistics.median(ours / theirs for theirs, ours in rounds)
    fits = statistics.median(ours for _, ours in rounds)
    steps = max(handle.stats.passes, key=lambda p: p.num_runs)
    budget = max(handle.stats.min_budget_bytes, handle.stats.needed_budget_bytes // 4)
    with mock.patch.object(executor, "copy_master", skip_copy):
        handle.replan(budget_bytes=budget)
        step_seconds(model)
        paged = statistics.median(step_seconds(model) for _ in range(ROUNDS))
    handle.detach()
    return {
        "tasks": steps.num_tasks,
        "plain_ms": statistics.median(theirs for theirs, _ in rounds) * 1e3,
        "fits_over_plain": ratio,
        "paged_us_a_task": (paged - fits) / steps.num_tasks * 1e6,
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
