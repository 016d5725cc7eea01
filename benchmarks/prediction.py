"""How far predictions of `finepage` are from the clock, model by model and budget by budget.

    python benchmarks/prediction.py --out benchmarks/prediction_2026-11-23

Random models run by plan: prefills and decode steps under each budget, a share of the weights. Each
pass is predicted with the rates that were measured when the model was attached and with the times
of its ops, measured one by one. Wall time is that of the whole call of the model. All figures are
medians in milliseconds, over runs with nothing else on the machine; "load" is what else there was.

The speed of a shared machine drifts by a third within a minute. So predicted and measured are
compared side by side: each round attaches the model anew, measures rates and ops, and runs at once.
The error is the median of the errors of the rounds; beside it are the smallest and the largest.

Columns after the error say what it consists of, each as predicted / measured: the time of the call
before the lanes begin, the ops on the compute lane, the copies on the h2d lane, and the waits of
the compute lane for copies. Only measured are the host's time between tasks that wait for nothing,
and the time after the last node. Exit status 1 if an error is above `--most`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

from ds_finepage._compat.transformers import cache_name
from ds_finepage.api import attach
from ds_finepage.cli.options import counts_of, names_of
from ds_finepage.graph.memgraph import Lane, MemGraph
from ds_finepage.graph.timeline import Timeline
from ds_finepage.runtime.handle import Handle

CACHE = cache_name(transformers.LlamaForCausalLM.forward)
VOCAB = 2000
WARM_STEPS = 3
"""Decode steps of each generation that are left out: the first ones restore the residents."""

SIZES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
    "gpt2": {"n_embd": 768, "n_layer": 8, "n_head": 12, "bos_token_id": 0, "eos_token_id": 0},
    "mixtral": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
    },
}

Figures = dict[str, float]
"""Of one run: name -> milliseconds, or a count."""


def make_model(name: str) -> Any:
    """Make a model of random weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, vocab_size=VOCAB, **SIZES[name])
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def host_gaps_ns(memgraph: MemGraph, measured: Timeline) -> int:
    """Return the time in which the compute lane was free and waited for no node."""
    spans = {span.node: span for span in measured.spans}
    complete: list[int] = []
    gaps = free = 0
    for node, before in zip(memgraph.nodes, memgraph.predecessors, strict=True):
        ready = max((complete[b] for b in before), default=0)
        span = spans.get(node.id)
        complete.append(ready if span is None else span.end_ns)
        if span is not None and span.lane is Lane.COMPUTE:
            gaps += max(0, span.start_ns - max(ready, free)) if free else 0
            free = span.end_ns
    return gaps


def lane_ns(timeline: Timeline, lane: Lane) -> int:
    """Return the time that a lane is busy."""
    return sum(s.end_ns - s.start_ns for s in timeline.spans if s.lane is lane)


def begin_ns(timeline: Timeline) -> int:
    """Return when the first node begins."""
    return min((s.start_ns for s in timeline.spans), default=0)


def figures_of(handle: Handle, phase: str, wall_ns: int) -> Figures | None:
    """Return the figures of the last run; None if it did not run by plan."""
    found = [p for p in handle.observed() if p.name.startswith(phase)]
    if not found or found[-1].measured is None:
        return None
    memgraph, predicted, measured = found[-1].memgraph, found[-1].predicted, found[-1].measured
    gaps_ns = host_gaps_ns(memgraph, measured)
    return {
        "measured": wall_ns / 1e6,
        "predicted": predicted.total_ns / 1e6,
        "before_predicted": begin_ns(predicted) / 1e6,
        "before_measured": begin_ns(measured) / 1e6,
        "compute_predicted": predicted.compute_ns / 1e6,
        "compute_measured": measured.compute_ns / 1e6,
        "h2d_predicted": lane_ns(predicted, Lane.H2D) / 1e6,
        "h2d_measured": lane_ns(measured, Lane.H2D) / 1e6,
        "waits_predicted": (predicted.stall_ns - begin_ns(predicted)) / 1e6,
        "waits_measured": (measured.stall_ns - begin_ns(measured) - gaps_ns) / 1e6,
        "host_gaps": gaps_ns / 1e6,
        "after": (wall_ns - measured.total_ns) / 1e6,
        "num_tasks": len(memgraph.graph.tasks),
        "num_copies": sum(s.lane is not Lane.COMPUTE for s in measured.spans),
    }


@torch.no_grad()
def generation(model: Any, prompt: int, steps: int) -> Iterator[tuple[str, int]]:
    """Run a prefill and decode steps; yield the phase and the wall time of each."""

    def timed(ids: torch.Tensor, **kwargs: Any) -> tuple[Any, int]:
        start = time.perf_counter_ns()
        out = model(ids, use_cache=True, **kwargs)
        return out, time.perf_counter_ns() - start

    out, wall_ns = timed(torch.arange(1, prompt + 1)[None] % VOCAB)
    yield "prefill", wall_ns
    for _ in range(steps):
        ids = out.logits[:, -1:].argmax(-1)
        out, wall_ns = timed(ids, **{CACHE: out[CACHE]})
        yield "decode", wall_ns


def measure(
    name: str, shares: list[int], *, prompt: int, steps: int, repeats: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Measure a model under each budget.

    Args:
        name: The model.
        shares: Budgets, in percent of the weights.
        prompt: Tokens of the prompt.
        steps: Decode steps of a generation.
        repeats: Generations of a round whose figures count, after two that do not.
        rounds: How often the model is attached under each budget.

    Yields:
        A row for each phase and budget.
    """
    torch._dynamo.reset()
    model = make_model(name)
    for share in shares:
        found: dict[str, list[Figures]] = defaultdict(list)
        for _ in range(rounds):
            handle = attach(model, device_budget=f"{share}%weights", device="cpu")
            handle.record()
            for phase, medians in one_round(handle, model, prompt, steps, repeats).items():
                found[phase].append(medians)
            handle.detach()
        for phase, figures in found.items():
            errors = sorted(f["predicted"] / f["measured"] - 1 for f in figures)
            yield {
                "model": name,
                "phase": phase,
                "share": share,
                "error": statistics.median(errors),
                "errors": errors,
                **medians_of(figures),
            }


def one_round(
    handle: Handle, model: Any, prompt: int, steps: int, repeats: int
) -> dict[str, Figures]:
    """Run generations; return the medians of each phase that ran by plan."""
    runs: dict[str, list[Figures]] = defaultdict(list)
    for repeat in range(repeats + 2):
        for step, (phase, wall_ns) in enumerate(generation(model, prompt, steps)):
            found = figures_of(handle, phase, wall_ns)
            if found is not None and repeat >= 2 and (step == 0 or step > WARM_STEPS):
                runs[phase].append(found)
    return {phase: medians_of(figures) for phase, figures in runs.items()}


def medians_of(figures: list[Figures]) -> Figures:
    """Return the median of each figure."""
    return {name: statistics.median(f[name] for f in figures) for name in figures[0]}


PAIRS = ("before", "compute", "h2d", "waits")
HEADS = ("model", "pass", "budget", "measured", "predicted", "error", *PAIRS, "between", "after")


def cells(row: dict[str, Any]) -> list[str]:
    """Return a row of the table."""
    return [
        row["model"],
        row["phase"],
        f"{row['share']}%",
        f"{row['measured']:.2f}",
        f"{row['predicted']:.2f}",
        f"{row['error']:+.1%} ({row['errors'][0]:+.0%} to {row['errors'][-1]:+.0%})",
        *(f"{row[f'{n}_predicted']:.2f} / {row[f'{n}_measured']:.2f}" for n in PAIRS),
        f"{row['host_gaps']:.2f}",
        f"{row['after']:.2f}",
    ]


def markdown(rows: list[dict[str, Any]], facts: dict[str, Any]) -> str:
    """Return the document."""
    lines = ["# Predicted and measured times of `finepage` on the CPU", ""]
    lines += [f"    {facts['command']}", ""]
    lines += [", ".join(f"{k} {v}" for k, v in facts.items() if k != "command") + ".", ""]
    lines += ["Milliseconds, medians; pairs are predicted / measured. See the script's head.", ""]
    lines += ["| " + " | ".join(HEADS) + " |", "|---" * len(HEADS) + "|"]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    worst = max(rows, key=lambda row: abs(row["error"]))
    lines += ["", f"Largest error: {worst['error']:+.1%}, {worst['model']} {worst['phase']}."]
    return "\n".join(lines) + "\n"


def main(say: Callable[[str], None] = print) -> int:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SIZES), help=f"of {', '.join(SIZES)}")
    parser.add_argument("--shares", default="40,60,80", help="budgets, in percent of the weights")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=3, help="generations of a round")
    parser.add_argument("--rounds", type=int, default=5, help="measured anew in each")
    parser.add_argument("--threads", type=int, default=1, help="threads of an op")
    parser.add_argument("--most", type=float, default=0.15, help="largest error that is well")
    parser.add_argument("--out", type=Path, help="writes OUT.md and OUT.json")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    facts = {
        "command": shlex.join(["python", "benchmarks/prediction.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()} with {os.cpu_count()} cores",
        "threads": arguments.threads,
        **{name: version(name) for name in ("torch", "transformers")},
        "load": f"{os.getloadavg()[0]:.1f}",
    }
    say(" | ".join(HEADS))
    rows = []
    for name in names_of(arguments.models, "--models"):
        for row in measure(
            name,
            counts_of(arguments.shares, "--shares"),
            prompt=arguments.prompt,
            steps=arguments.steps,
            repeats=arguments.repeats,
            rounds=arguments.rounds,
        ):
            say(" | ".join(cells(row)))
            rows.append(row)
    if arguments.out is not None:
        arguments.out.with_suffix(".md").write_text(markdown(rows, facts))
        text = json.dumps({**facts, "rows": rows}, indent=1)
        arguments.out.with_suffix(".json").write_text(text + "\n")
    return int(max(abs(row["error"]) for row in rows) > arguments.most)


if __name__ == "__main__":
    sys.exit(main())
