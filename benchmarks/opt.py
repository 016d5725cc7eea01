"""Simulates OPT on a T4 with 208 GB of host memory, beside the figures that others published.

    python benchmarks/opt.py --out benchmarks/opt_2026-11-29.json

A cell is a model, a length of the prompt and a policy. A generation is a prefill and 31 steps, each
as long as the last one; its tokens a second are those of 32 new tokens of each sequence. The batch
of ``finepage`` is that of ``plan --batch auto``. That of a baseline grows by powers of two, four at
a time and then between, as long as that pays. Every time is simulated; nothing is run. Finished
cells in the output file are kept. With ``--weights int4`` the weights are packed, and results are
those of the quantised model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ds_finepage.batches import find_best
from ds_finepage.errors import CaptureError, PlanInfeasibleError
from ds_finepage.modeller import Modeller
from ds_finepage.units import NS_PER_S, parse_bytes

HARDWARE, HOST_MEMORY = "t4", "208GB"
NEW_TOKENS = 32
MAX_BATCH = 1024
POLICIES = ("finepage", "static", "zero-persistence")
PUBLISHED = {
    512: {
        "ZeRO-Inference": (9.28, 0.60, 0.01),
        "Accelerate": (25.12, 0.62, 0.01),
        "Petals": (8.25, 2.84, 0.08),
        "FlexGen": (25.26, 7.32, 0.69),
        "FlexGen, 4 bit": (29.12, 8.70, 1.12),
    },
    1024: {
        "ZeRO-Inference": (4.59, 0.29, None),
        "Accelerate": (13.01, 0.31, 0.01),
        "Petals": (6.56, 1.51, 0.06),
        "FlexGen": (13.72, 3.50, 0.35),
        "FlexGen, 4 bit": (13.18, 3.98, 0.42),
    },
}
"""Tokens a second of OPT-6.7B, 30B and 175B on this machine (FlexGen, arXiv 2303.06865); None: out
of memory. Systems use a disk where the host memory is too small."""
MODELS = ("opt-6.7b", "opt-30b", "opt-175b")


class Models:
    """Captures each shape once for all policies."""

    def __init__(
        self, model: str, prompt_tokens: int, host_memory: str, weights: str | None
    ) -> None:
        self._model, self._prompt_tokens, self._weights = model, prompt_tokens, weights
        self._host_memory_bytes = parse_bytes(host_memory, name="--host-memory")
        self._made: dict[int, Modeller] = {}

    def of(self, batch: int) -> Modeller:
        """Capture the passes with a batch."""
        if batch not in self._made:
            self._made[batch] = Modeller(
                self._model,
                batch=batch,
                prompt_tokens=self._prompt_tokens,
                new_tokens=NEW_TOKENS,
                device_budget="auto",
                hardware=HARDWARE,
                split=True,
                host_memory_bytes=self._host_memory_bytes,
                weights=self._weights,
            )
        return self._made[batch]


def trial(models: Models, batch: int, policy: str) -> dict[str, Any]:
    """Simulate a generation; without a speed if it does not fit."""
    try:
        prefill, decode = models.of(batch).figures(policy)
    except (PlanInfeasibleError, CaptureError) as error:
        return {"batch": batch, "tokens_per_s": 0.0, "reason": str(error)}
    assert prefill.modelled_ns is not None and decode.modelled_ns is not None
    total_ns = prefill.modelled_ns + (NEW_TOKENS - 1) * decode.modelled_ns
    return {
        "batch": batch,
        "tokens_per_s": batch * NEW_TOKENS * NS_PER_S / total_ns,
        "prefill_ns": prefill.modelled_ns,
        "decode_ns": decode.modelled_ns,
        "decode_h2d_bytes": decode.modelled_h2d_bytes,
    }


def trials(models: Models, policy: str) -> list[dict[str, Any]]:
    """Simulate batches until none is faster: four times as large, then those between."""
    found = {1: trial(models, 1, policy)}
    batch = 4
    while batch <= MAX_BATCH and found[batch // 4]["tokens_per_s"]:
        found[batch] = trial(models, batch, policy)
        if found[batch]["tokens_per_s"] <= found[batch // 4]["tokens_per_s"]:
            break
        batch *= 4
    best = max(found, key=lambda n: found[n]["tokens_per_s"])
    for other in (best * 2, best // 2):
        if other and found[best]["tokens_per_s"]:
            found[other] = trial(models, other, policy)
    return [found[n] for n in sorted(found)]


def best_of_finepage(
    model: str, prompt_tokens: int, host_memory: str, weights: str | None
) -> dict[str, Any]:
    """Find the batch of ``finepage``; without a speed if not even one sequence fits."""
    make = partial(
        Modeller,
        model,
        prompt_tokens=prompt_tokens,
        new_tokens=NEW_TOKENS,
        device_budget="auto",
        hardware=HARDWARE,
        split=True,
        host_memory_bytes=parse_bytes(host_memory, name="--host-memory"),
        weights=weights,
    )
    try:
        found = find_best(make)
    except (PlanInfeasibleError, CaptureError) as error:
        return {"batch": 1, "tokens_per_s": 0.0, "reason": str(error)}
    return {
        "batch": found.batch,
        "tokens_per_s": found.planned.tokens_per_s,
        "prefill_ns": found.prefill.predicted_ns,
        "decode_ns": found.step.predicted_ns,
        "decode_h2d_bytes": found.step.reloaded_bytes,
        "host_bytes": found.step.host_bytes,
    }


def main(arguments: list[str]) -> int:
    """Fill the cells that are missing in the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seq", default="512,1024")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--host-memory", default=HOST_MEMORY)
    parser.add_argument("--weights", help="their form; by default as the models have them")
    options = parser.parse_args(arguments)
    document = {
        "hardware": HARDWARE,
        "new_tokens": NEW_TOKENS,
        "published": PUBLISHED,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "cells": [],
    }
    if options.out.exists():
        document = json.loads(options.out.read_text())
    cells = document["cells"]
    names = ("model", "seq", "host_memory", "policy")
    done = {tuple(cell[name] for name in names) for cell in cells}
    for model in options.models.split(","):
        for seq in map(int, options.seq.split(",")):
            models = Models(model, seq, options.host_memory, options.weights)
            for policy in options.policies.split(","):
                named = f"{policy}, {options.weights}" if options.weights else policy
                key = (model, seq, options.host_memory, named)
                if key in done:
                    continue
                start = time.process_time()
                if policy == "finepage":
                    found = [best_of_finepage(model, seq, options.host_memory, options.weights)]
                else:
                    found = trials(models, policy)
                seconds = time.process_time() - start
                cells.append({**dict(zip(names, key, strict=True)), "trials": found})
                cells[-1]["plan_seconds"] = seconds
                options.out.write_text(json.dumps(document, indent=1) + "\n")
                best = max(found, key=lambda t: t["tokens_per_s"])
                print(*key, best["batch"], f"{best['tokens_per_s']:.2f}", f"{seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
