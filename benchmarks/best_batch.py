"""Holds the batch of ``plan --batch auto`` against an exhaustive search: no GPU, no weights.

    python benchmarks/best_batch.py

The exhaustive search plans every batch up to 4, then each that is an eighth larger than the one
before, and all within 3 of the one that was found, until two have no room. Prompts of 512 tokens,
128 new ones, 256 GiB of host memory. Times are of this machine, on one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from ds_finepage.batches import BestBatch, find_best
from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.modeller import Modeller
from ds_finepage.units import NS_PER_S

MODELS = "llama-7b,mixtral-8x7b,llama-65b"
CARDS = "v100-16gb,rtx-4090,a100-80gb"
PROMPT, NEW = 512, 128
MOST, NEAR = 1024, 3


def exhaustive(make: Callable[..., Modeller], found: BestBatch) -> dict[int, float]:
    """Return the tokens a second of each batch by plan."""
    tried = [1, 2, 3, 4]
    while tried[-1] < MOST:
        tried.append(max(tried[-1] + 1, tried[-1] * 9 // 8))
    tried += range(max(1, found.batch - NEAR), found.batch + NEAR + 1)
    speeds: dict[int, float] = {}
    num_refused = 0
    for batch in sorted(set(tried)):
        try:
            first, step = make(batch=batch).figures("finepage")
        except PlanInfeasibleError:
            num_refused += 1
            if num_refused > 1 and batch > found.batch + NEAR:
                break
            continue
        assert first.modelled_ns is not None and step.modelled_ns is not None
        total_ns = first.modelled_ns + (NEW - 1) * step.modelled_ns
        speeds[batch] = batch * NEW * NS_PER_S / total_ns
    return speeds


def main() -> None:
    """Print a line for each model and card."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--cards", default=CARDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("model", "card", "batch", "tok/s", "s", "of all", "tok/s", "share", "planned")
    table, console = Table(*columns), Console(width=120)
    for card in options.cards.split(","):
        for model in options.models.split(","):
            make = partial(
                Modeller,
                model,
                prompt_tokens=PROMPT,
                new_tokens=NEW,
                device_budget="auto",
                hardware=card,
                split=True,
                host_memory_bytes=256 << 30,
            )
            start = time.perf_counter()
            found = find_best(make)
            seconds = time.perf_counter() - start
            speeds = exhaustive(make, found)
            best = max(speeds, key=lambda batch: speeds[batch])
            speed = found.planned.tokens_per_s
            cells = (model, card, found.batch, f"{speed:.2f}", f"{seconds:.1f}", best)
            more = (f"{speeds[best]:.2f}", f"{speed / speeds[best]:.3f}", len(speeds))
            table.add_row(*map(str, (*cells, *more)))
            print(*cells, *more, flush=True)
    console.print(table)


if __name__ == "__main__":
    main()
