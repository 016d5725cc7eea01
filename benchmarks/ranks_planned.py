"""Simulates what several ranks buy: LLaMA-7B and 65B on 1, 2 and 4 V100-16GB.

    python benchmarks/ranks_planned.py --out benchmarks/ranks_planned_2026-11-22

Writes a .json and a .md with two tables of decode steps, batch 1. In one each card has the same
budget. In the other each rank has the same share of its own weights. Nothing is run and no rank is
started: the first rank's pass is captured from published dimensions, and times are predicted from
the shipped hardware profile. Exit status 1 if a figure misses its target.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planned_page import command_of, keep, options_of, table, versions_used

from ds_finepage.config import DeviceBudget
from ds_finepage.graph.profiles import load_profile
from ds_finepage.planning.budget import budget_on
from ds_finepage.units import format_bytes, format_ns
from ds_finepage.whatif import capture_model, plan_captured

MODELS = ("llama-7b", "llama-65b")
HARDWARE = "v100-16gb"
RANKS = (1, 2, 4)
SEQ = 2048
PERCENTS = (10, 25, 50, 75, 90)

WHOLE_CARD = "auto"
BUDGETS_OF_A_CARD = (WHOLE_CARD, "8GiB", "4GiB")
"""Budgets in bytes, the same for each card."""

LEAST_SPEED_UP = 3.6
"""Target of the tokens a second of LLaMA-65B on 4 cards over those on one, all of a card each."""

MOST_BYTES = 0.52
"""Target of the bytes that one of two ranks reloads over those of one, at an equal share."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A decode step of one rank under one budget, with the speed of all ranks."""

    model: str
    num_ranks: int
    budget: str
    budget_bytes: int
    weight_bytes: int
    reloaded_bytes: int
    bound_bytes: int
    sent_bytes: int
    predicted_ns: int
    bound_ns: int
    compute_ns: int
    tokens_per_s: float


def cases_of(model: str) -> Iterable[Case]:
    """Plan all cases of a model."""
    profile = load_profile(HARDWARE)
    for num_ranks in RANKS:
        captured = capture_model(
            model, phase="decode", batch=1, seq=SEQ, profile=profile, num_ranks=num_ranks
        )
        weight_bytes = captured.graph.weight_bytes
        for text in (*BUDGETS_OF_A_CARD, *(f"{percent}%weights" for percent in PERCENTS)):
            budget_bytes = budget_on(DeviceBudget.parse(text), weight_bytes, profile)
            figures = plan_captured(captured, budget_bytes=budget_bytes, profile=profile).figures
            yield Case(
                model=model,
                num_ranks=num_ranks,
                budget=text,
                budget_bytes=budget_bytes,
                weight_bytes=weight_bytes,
                reloaded_bytes=figures.reloaded_bytes,
                bound_bytes=figures.lower_bound_bytes,
                sent_bytes=figures.sent_bytes,
                predicted_ns=figures.predicted_ns,
                bound_ns=figures.lower_bound_ns,
                compute_ns=figures.compute_ns,
                tokens_per_s=figures.tokens_per_s,
            )


def on_one(cases: Sequence[Case], case: Case) -> Case:
    """Return the case of one rank beside a case of several."""
    same = (c for c in cases if (c.model, c.budget) == (case.model, case.budget))
    return next(c for c in same if c.num_ranks == 1)


def speed_up(cases: Sequence[Case], case: Case) -> float:
    """Return the speed of all ranks over that of one."""
    return case.tokens_per_s / on_one(cases, case).tokens_per_s


def share(cases: Sequence[Case], case: Case) -> float:
    """Return what a rank reloads over what one rank reloads; 0 if that is nothing."""
    whole = on_one(cases, case).reloaded_bytes
    return case.reloaded_bytes / whole if whole else 0.0


def summary(cases: Sequence[Case]) -> list[dict[str, float | str | bool]]:
    """Hold the cases against their targets."""
    ups = [
        speed_up(cases, case)
        for case in cases
        if (case.model, case.num_ranks, case.budget) == ("llama-65b", 4, WHOLE_CARD)
    ]
    shares = [
        share(cases, case)
        for case in cases
        if case.num_ranks == 2 and case.budget.endswith("%weights")
    ]
    found: list[dict[str, float | str | bool]] = []
    if ups:
        found.append(
            {
                "what": f"tokens/s on 4 {HARDWARE} over one, llama-65b, whole cards",
                "found": min(ups),
                "target": f">= {LEAST_SPEED_UP}",
                "holds": min(ups) >= LEAST_SPEED_UP,
            }
        )
    found.append(
        {
            "what": "bytes reloaded by one of two ranks over those of one rank, equal share, worst",
            "found": max(shares),
            "target": f"<= {MOST_BYTES}",
            "holds": max(shares) <= MOST_BYTES,
        }
    )
    return found


# The page.


HEADINGS = (
    "model",
    "ranks",
    "budget of a card",
    "weights of a rank",
    "reloaded by a rank",
    "over one rank's",
    "bytes / bound",
    "sent by a rank",
    "compute",
    "step",
    "time / bound",
    "tokens/s of all",
    "over one rank's",
)


def rows_of(cases: Sequence[Case], *, are_shares: bool) -> Iterable[list[str]]:
    """Yield a row for each case: budgets in bytes, or shares of a rank's own weights."""
    for case in cases:
        if case.budget.endswith("%weights") is not are_shares:
            continue
        words = f"{case.budget.removesuffix('weights')} = " if are_shares else ""
        over_bound = case.reloaded_bytes / case.bound_bytes if case.bound_bytes else 1.0
        yield [
            case.model,
            str(case.num_ranks),
            words + format_bytes(case.budget_bytes),
            format_bytes(case.weight_bytes),
            format_bytes(case.reloaded_bytes),
            f"{share(cases, case):.3f}",
            f"{over_bound:.4f}",
            format_bytes(case.sent_bytes),
            format_ns(case.compute_ns),
            format_ns(case.predicted_ns),
            f"{case.predicted_ns / case.bound_ns:.4f}",
            f"{case.tokens_per_s:.3f}",
            f"{speed_up(cases, case):.2f} x",
        ]


def page(cases: Sequence[Case], date: str, command: str) -> str:
    """Return the page with both tables."""
    versions = ", ".join(f"{name} {number}" for name, number in versions_used().items())
    profile = load_profile(HARDWARE)
    holds = {True: "yes", False: "**no**"}
    targets = [
        [str(s["what"]), f"{s['found']:.4g}", str(s["target"]), holds[bool(s["holds"])]]
        for s in summary(cases)
    ]
    return "\n".join(
        [
            f"# What several ranks buy, {date}",
            "",
            f"    {command}",
            "",
            "**Simulated: nothing was run, and no rank was started.** Decode steps of policy "
            f"`finepage` with `split`, batch 1, {SEQ:,} tokens in the KV cache, float16. The model "
            "is cut as DeepSpeed's AutoTP cuts it, and the first rank's pass is planned. Each "
            f"card is a {HARDWARE}. A rank sends to the next one at "
            f"{profile.rank_bytes_per_s / 1e9:g}e9 bytes/s and "
            f"{format_ns(profile.rank_latency_ns)} a step. Each card has a host link of its own; "
            "that ranks share the host's memory is not modelled. Embedding tables and norms are "
            f"whole on every rank. {versions}.",
            "",
            *table(["figure", "found", "target", "holds"], targets),
            "",
            "## The same budget for each card",
            "",
            "More ranks also bring more device memory, so a rank reloads less than its part.",
            "",
            *table(HEADINGS, rows_of(cases, are_shares=False)),
            "",
            "## The same share of a rank's own weights",
            "",
            *table(HEADINGS, rows_of(cases, are_shares=True)),
            "",
        ]
    )


def main(arguments: list[str]) -> int:
    """Plan all cases; write and print them."""
    options = options_of(arguments, __doc__, MODELS)
    cases = [case for model in options.models.split(",") for case in cases_of(model)]
    command = command_of("ranks_planned.py", arguments)
    text = page(cases, options.out.name[-10:], command)
    return keep(options.out, command, text, summary(cases), cases)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
