"""What a decode step costs the host, beside plain transformers in the same process, on the CPU.

    python benchmarks/host_time.py --out benchmarks/host_time_2026-11-22.json

Two figures a model: the time of a step over that of plain transformers where everything fits, and
at a budget of 25% of what the model needs, with the copies of weights left out, the time a task
takes beyond a step that fits. All three run in turns of
a few steps, so that a change of the machine's speed hits all; medians over the turns, with
quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

from ds_finepage._compat.transformers import cache_name
from ds_finepage.api import attach
from ds_finepage.execution.lanes import Action, CpuLanes
from ds_finepage.execution.program import Program
from ds_finepage.graph.memgraph import Lane

CACHE = cache_name(transformers.LlamaForCausalLM.forward)
ROUNDS = 15
STEPS = 60
TURN = 15
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


@torch.no_grad()
def steps(model: Any) -> Iterator[float]:
    """Decode without an end; yield the seconds of each step."""
    out = model(torch.arange(1, 17)[None], use_cache=True)
    while True:
        token = out.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        out = model(token, **{CACHE: out[CACHE]}, use_cache=True)
        yield time.perf_counter() - start


def warm_up(model: Any) -> None:
    """Let a model make its plans."""
    list(islice(steps(model), STEPS))


def in_turns(models: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Let all models decode in turns; yield the median time of a step of each, turn by turn."""
    running = {name: steps(model) for name, model in models.items()}
    for turn in range(STEPS // TURN):
        seconds = {n: statistics.median(islice(run, TURN)) for n, run in running.items()}
        if turn > 0:
            yield seconds


def run_without_copies(lanes: CpuLanes, program: Program, actions: dict[int, Action]) -> None:
    """Run a pass whose transfers do nothing."""
    if program not in without_copies:
        copies = {s.node.id: do_nothing for s in program.merged if s.lane is not Lane.COMPUTE}
        without_copies[program] = actions | copies
    run(lanes, program, without_copies[program])


run = CpuLanes.run
without_copies: dict[Program, dict[int, Action]] = {}


def do_nothing() -> None:
    """Stand in for the copy of a weight."""


def measure(hidden: int, layers: int) -> dict[str, Any]:
    """Measure one model: plain, where it fits, and paged, in turns.

    Other programs on the machine change how fast it is, from one moment to the next. So the
    figures are of steps that were measured side by side, and their spread is told beside them.
    """
    models = {name: make_model(hidden, layers) for name in ("plain", "fits", "paged")}
    handles = [attach(models[n], device_budget="1GiB", device="cpu") for n in ("fits", "paged")]
    for name in ("fits", "paged"):
        warm_up(models[name])
    stats = handles[1].stats
    num_tasks = max(stats.passes, key=lambda p: p.num_runs).num_tasks
    budget = max(stats.min_budget_bytes, stats.needed_budget_bytes // 4)
    handles[1].replan(budget_bytes=budget)
    warm_up(models["paged"])  # with copies, so that there are weights where weights belong
    with mock.patch.object(CpuLanes, "run", run_without_copies):
        rounds = [turn for _ in range(ROUNDS) for turn in in_turns(models)]
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
