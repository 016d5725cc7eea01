"""Judges a comparison: the fastest arm of each batch, and what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_finepage.compare.arms import ARMS, OURS
from ds_finepage.reporting.results import Results, Run
from ds_finepage.units import format_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Winner:
    """The fastest run of one batch within the budget.

    Attributes:
        part: "prefill", "decode step" or "whole generation".
        run: The fastest run.
        time_ns: Its time.
        ours_ns: The time of our arm; None if it has none within the budget.
        other: The fastest run of another system; None if there is none.
        other_ns: Its time.
    """

    part: str
    run: Run
    time_ns: int
    ours_ns: int | None
    other: Run | None
    other_ns: int | None

    def text(self) -> str:
        """Name the winner in words, with the ratio of ours to the best other arm."""
        found = f"{self.part}: {self.run.arm} is fastest within the budget, "
        found += format_ns(self.time_ns)
        if self.other is None or self.other_ns is None:
            return f"{found}; no other system is within it"
        if self.ours_ns is None:
            return f"{found}; {OURS} is not among them"
        ratio = self.ours_ns / self.other_ns if self.other_ns else 1.0
        return f"{found}; {OURS} takes {ratio:.2f} x the time of the best other, {self.other.arm}"


def winners(results: Results, batch: int) -> list[Winner]:
    """Return the winners of a batch: of the prefill, the decode step and the whole generation.

    Args:
        results: The results.
        batch: Sequences in the batch.
    """
    steps = results.settings.new_tokens - 1 if results.settings else 1
    found = []
    for part, num_prefills, num_steps in (
        ("prefill", 1, 0),
        ("decode step", 0, 1),
        ("whole generation", 1, steps),
    ):
        timed = []
        for run in results.runs:
            first = results.time_of(run.prefill) if num_prefills else 0
            step = results.time_of(run.decode) if num_steps else 0
            if run.batch == batch and run.holds_budget and None not in (first, step):
                timed.append(((first or 0) + num_steps * (step or 0), run))
        if timed:
            found.append(_winner(part, sorted(timed, key=lambda each: each[0])))
    return found


def _winner(part: str, timed: Sequence[tuple[int, Run]]) -> Winner:
    """Return the winner of runs in the order of their times."""
    other = next(((t, r) for t, r in timed if not ARMS[r.arm].is_ours), (None, None))
    return Winner(
        part=part,
        run=timed[0][1],
        time_ns=timed[0][0],
        ours_ns=next((t for t, r in timed if r.arm == OURS), None),
        other=other[1],
        other_ns=other[0],
    )


def problems_of(results: Results) -> list[str]:
    """List the faults of a comparison, in words."""
    problems = []
    for run in results.runs:
        if run.tokens_equal is False:
            problems.append(f"batch {run.batch}: the tokens of {run.arm} differ")
        by_plan = run.arm in ARMS and ARMS[run.arm].observes
        if run.reason is None and by_plan and not run.holds_budget:
            problems.append(
                f"batch {run.batch}: {run.arm} had {run.peak_bytes} bytes on the device; the "
                f"budget is {run.budget_bytes} bytes"
            )
    return problems
