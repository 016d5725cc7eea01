"""What drafts must not change, and what they may cost: checks that take minutes, on the CPU.

    python benchmarks/draft_checks.py --folder FOLDER CHECK...

It trains the models of ``drafts.py``, or takes them from the folder. Each check prints its figures.

``equal``: greedy tokens of 200 prompts, three kinds of drafts, float32 and bfloat16. Where a token
differs, the two highest logits of plain transformers are compared: equal within the last bits of
the type is a tie. ``samples``: 20,000 sampled tokens against the target's own chances (chi-square).
``peak``: device bytes of a generation with a stand-in. ``plans``: captures and plans behind the
first 16 of 500 tokens. ``never``: time a token with a draft that is never right, over none.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafts
import torch
from transformers import logging

from ds_finepage import api
from ds_finepage.execution.meter import DeviceMeter
from ds_finepage.integrations.transformers.price import Price

RATE = 20e6
"""Bytes of copies a second, in ``never``."""

LEAD, NUM_BINS = 32, 100
"""In ``samples``: tokens of each prompt, and bins of the test."""

STAND_IN = {"draft": "stand-in", "weights_group": 16}


def attach(target: Any, percent: int, **settings: Any) -> Any:
    """Attach a model under a share of its weights."""
    nbytes = sum(p.nbytes for p in target.parameters())
    return api.attach(target, device_budget=nbytes * percent // 100, device="cpu", **settings)


def steps_apart(model: Any, prompt: list[int], found: list[int], expected: list[int]) -> float:
    """Return how far two tokens' logits are apart where the sequences part, in last bits."""
    i = next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + expected[:i]])).logits[0, -1]
    top, other = logits[expected[i]].float(), logits[found[i]].float()
    last_bit = torch.finfo(logits.dtype).eps * 2.0 ** math.floor(math.log2(abs(top.item())))
    return float((top - other).abs() / last_bit)


def equal(folder: Path, prompts: list[list[int]]) -> None:
    """Compare greedy tokens. Drafts of six tokens are made whether they pay or not."""
    Price.length = lambda price: min(6, price.most)  # type: ignore[assignment,method-assign]
    for dtype, percent in ((torch.float32, 50), (torch.bfloat16, 110)):
        plain = drafts.load(folder / "target").to(dtype)
        expected = drafts.generate(plain, prompts, {})
        for name in ("stand-in int4", "smaller model", "prompt lookup"):
            torch._dynamo.reset()
            (settings, given), target = drafts.KINDS[name], drafts.load(folder / "target").to(dtype)
            if "assistant_model" in given:
                given = {"assistant_model": drafts.load(folder / "draft").to(dtype)}
            handle = attach(target, percent, **settings)
            found = drafts.generate(target, prompts, given)
            stats = handle.stats
            handle.detach()
            pairs = zip(prompts, found, expected, strict=True)
            apart = [steps_apart(plain, p, f, e) for p, f, e in pairs if f != e]
            print(
                f"equal: {dtype}, {percent}%, {name}: {len(prompts) - len(apart)} of "
                f"{len(prompts)}; the others part at logits at most {max(apart, default=0):.2f} "
                f"last bits apart; {stats.num_drafted} drafted, {stats.num_accepted} accepted",
                flush=True,
            )


def samples(folder: Path, prompts: list[list[int]], count: int = 20_000) -> None:
    """Compare sampled tokens with the target's own chances, by a chi-square test.

    Where tokens are drawn by their chances, the chances of all likelier tokens with a random part
    of the token's own are spread evenly from 0 to 1. The smaller model drafts three tokens each
    time, and is often wrong.
    """
    Price.length = lambda price: min(3, price.most)  # type: ignore[assignment,method-assign]
    plain, target = drafts.load(folder / "target"), drafts.load(folder / "target")
    handle = attach(target, 85, draft=drafts.load(folder / "draft"))
    given = {"do_sample": True, "top_k": 0, "temperature": 1.0, "max_new_tokens": 256}
    drawn, parts = torch.zeros(0), torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    for prompt in prompts:
        tokens = target.generate(torch.tensor([prompt[:LEAD]]), **given)[0]
        with torch.no_grad():
            chances = torch.softmax(plain(tokens[None]).logits[0, LEAD - 1 : -1], dim=-1)
        own = chances.gather(1, tokens[LEAD:, None])
        likelier = (chances * (chances > own)).sum(dim=1)
        drawn = torch.cat([drawn, likelier + own[:, 0] * torch.rand(len(own), generator=parts)])
        if len(drawn) >= count:
            break
    stats = handle.stats
    handle.detach()
    found, expected = torch.histc(drawn, NUM_BINS, 0, 1), len(drawn) / NUM_BINS
    chi = ((found - expected) ** 2 / expected).sum().item()
    half = torch.tensor([(NUM_BINS - 1) / 2, chi / 2], dtype=torch.float64)
    p = torch.special.gammaincc(half[0], half[1]).item()
    print(
        f"samples: {len(drawn)} tokens, chi-square {chi:.1f} of {NUM_BINS - 1} degrees, "
        f"p = {p:.2f}; {stats.num_drafted} drafted, {stats.num_accepted} accepted"
    )


def peak(folder: Path, prompts: list[list[int]]) -> None:
    """Print the device bytes of generations with a stand-in, which lies there beforehand."""
    for percent in (50, 75, 95):
        handle = attach(target := drafts.load(folder / "target"), percent, **STAND_IN)
        drafts.generate(target, prompts[:1], {})
        with DeviceMeter(torch.device("cpu")) as meter:
            drafts.generate(target, prompts[:3], {})
        stats = handle.stats
        print(
            f"peak: {percent}%: {meter.peak_bytes + stats.draft_bytes} of {stats.budget_bytes} "
            f"bytes, {stats.draft_bytes} of them the draft's",
            flush=True,
        )
        handle.detach()


class Counter:
    """Counts captures and plans when each token is made, as a streamer."""

    def __init__(self, handle: Any) -> None:
        self.handle, self.rows = handle, [(0.0, 0, 0)]

    def put(self, value: torch.Tensor) -> None:
        """See tokens, the prompt first."""
        stats, now = self.handle.stats, time.perf_counter()
        new = 1 if len(self.rows) == 1 else value.numel()  # the prompt, as one row
        self.rows += [(now, stats.num_captures, stats.num_plans)] * new

    def end(self) -> None:
        """See the end."""


def watched(target: Any, handle: Any, prompt: list[int], num_new: int) -> list[Any]:
    """Return time, captures and plans at each new token; the first row is the prompt's."""
    seen = Counter(handle)
    given = {"max_new_tokens": num_new, "do_sample": False, "disable_compile": True}
    target.generate(torch.tensor([prompt]), streamer=seen, **given)
    return seen.rows[1:]


def plans(folder: Path, prompts: list[list[int]]) -> None:
    """Print captures and plans behind the first 16 of 500 tokens."""
    for percent in (75, 95, 50):
        torch._dynamo.reset()
        target = drafts.load(folder / "target")
        target.config.max_position_embeddings = 1024
        handle = attach(target, percent, **STAND_IN)
        rows = watched(target, handle, prompts[0][:12], 500)
        (_, captures, made), (_, last_captures, last_made) = rows[16], rows[-1]
        handle.detach()
        print(
            f"plans: {percent}%: {len(rows) - 1} tokens; behind the first 16 "
            f"{last_captures - captures} captures, {last_made - made} plans",
            flush=True,
        )


def never(folder: Path, prompts: list[list[int]]) -> None:
    """Print the time of a token with a draft that is never right, over none."""
    medians: dict[str, list[float]] = {"none": [], "never right": []}
    for _ in range(2):
        for name, times in medians.items():
            torch._dynamo.reset()
            target, wrong = drafts.load(folder / "target"), drafts.load(folder / "draft")
            with torch.no_grad():
                wrong.lm_head.weight = torch.nn.Parameter(-wrong.lm_head.weight)
            handle = attach(target, 50, draft=wrong if name != "none" else None)
            with drafts.slow_copies(RATE):
                rows = watched(target, handle, prompts[0], 130)
            times += [rows[-1][0] - rows[n][0] for n in (33, 65)]
            handle.detach()
    for k, (first, num) in enumerate(((32, 97), (64, 65))):
        with_draft, alone = (
            statistics.mean(times[k::2]) / num
            for times in (medians["never right"], medians["none"])
        )
        print(
            f"never: behind {first} tokens {with_draft:.3f} s a token, {alone:.3f} without: "
            f"{with_draft / alone:.3f}"
        )


CHECKS: dict[str, Callable[..., None]] = {
    check.__name__: check for check in (equal, samples, peak, plans, never)
}


def main() -> int:
    """Run the named checks, in this order."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="keeps models and prompts")
    parser.add_argument("checks", nargs="+", choices=CHECKS, metavar="CHECK")
    options = parser.parse_args()
    drafts.make(options.folder)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    prompts = json.loads((options.folder / "prompts.json").read_text())
    for name in options.checks:
        CHECKS[name](options.folder, prompts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
