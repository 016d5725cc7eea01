"""The runs of a comparison in words and figures: who is fastest, and every column of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds_finepage.reporting.results import PhaseFigures, Results, Run
from ds_finepage.units import format_bytes, format_ns

NONE = "-"
NS_PER_S = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The fastest run of one batch, by the time of a decode step.

    Attributes:
        batch: Sequences in the batch.
        ranked: The runs with a time, the fastest first.
    """

    batch: int
    ranked: tuple[Run, ...]


def is_modelled(results: Results) -> bool:
    """Tell whether modelled times decide: on the CPU, a fetch of stock engines copies nothing."""
    return results.settings is not None and results.device.startswith("cpu")


def deciding_ns(figures: PhaseFigures, *, modelled: bool) -> int | None:
    """Return the time by which engines are compared."""
    return figures.modelled_ns if modelled else figures.wall_ns


def copied_bytes(figures: PhaseFigures, *, modelled: bool) -> int | None:
    """Return the bytes to the device that go with :func:`deciding_ns`."""
    if figures.h2d_bytes is not None or not modelled:
        return figures.h2d_bytes
    return figures.modelled_h2d_bytes


def verdicts(results: Results) -> list[Verdict]:
    """Rank the runs of each batch; those that ended with a reason are left out."""
    modelled = is_modelled(results)
    found = []
    for batch in dict.fromkeys(run.batch for run in results.runs):
        timed = [
            (ns, run)
            for run in results.runs
            if run.batch == batch
            and run.reason is None
            and fits(run)
            and (ns := deciding_ns(run.decode, modelled=modelled)) is not None
        ]
        ranked = tuple(run for _, run in sorted(timed, key=lambda pair: pair[0]))
        found.append(Verdict(batch=batch, ranked=ranked))
    return found


def fits(run: Run) -> bool:
    """Tell whether a run kept to the budget, as far as that is known."""
    if run.out_of_memory:
        return False
    if run.budget_bytes is None or run.peak_bytes is None:
        return True
    return run.peak_bytes <= run.budget_bytes


def in_words(verdict: Verdict, *, modelled: bool) -> str:
    """Say in a sentence or two which run is fastest, and by how much."""
    if not verdict.ranked:
        return f"Batch {verdict.batch}: no run has a time for a decode step."
    best = verdict.ranked[0]
    best_ns = deciding_ns(best.decode, modelled=modelled) or 1
    text = f"Batch {verdict.batch}: {best.arm} is fastest, with {format_ns(best_ns)} a token"
    if len(verdict.ranked) == 1:
        return text + "."
    second = verdict.ranked[1]
    second_ns = deciding_ns(second.decode, modelled=modelled) or 0
    text += f". Next is {second.arm}, which takes {second_ns / best_ns:.2f} times as long"
    theirs = copied_bytes(second.decode, modelled=modelled)
    ours = copied_bytes(best.decode, modelled=modelled)
    if ours is not None and theirs is not None:
        text += f" and copies {format_bytes(theirs)} a step instead of {format_bytes(ours)}"
    return text + "."


# The table of runs.


def _bytes(value: int | None) -> str:
    return NONE if value is None else format_bytes(value)


def _ns(value: int | None) -> str:
    return NONE if value is None else format_ns(value)


def _ratio(value: float | None, base: float | None, form: str = ".2f") -> str:
    return format(value / base, form) if value is not None and base else NONE


def _error(figures: PhaseFigures) -> str:
    if figures.predicted_ns is None or not figures.wall_ns:
        return NONE
    return f"{figures.predicted_ns / figures.wall_ns - 1:+.1%}"


def _rate(value: float | None) -> str:
    return NONE if value is None else f"{value / 1e9:.2f} GB/s"


def _computing_ns(run: Run) -> int | None:
    return run.prefill.wall_ns


def _first_token_ns(run: Run) -> int | None:
    parts = (run.load_ns, run.capture_ns, run.plan_ns, _computing_ns(run))
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def _tokens_per_s(run: Run, ns: int | None) -> str:
    return f"{run.batch * NS_PER_S / ns:.2f}" if ns else NONE


def _equal(run: Run) -> str:
    return {True: "yes", False: "NO", None: NONE}[run.tokens_equal]


def _settings(run: Run) -> str:
    return ", ".join(f"{name}: {value}" for name, value in run.settings.items()) or NONE


Column = tuple[str, Callable[[Run], str]]

_PHASE: Sequence[tuple[str, Callable[[PhaseFigures], str]]] = (
    ("to the device", lambda f: _bytes(f.h2d_bytes)),
    ("to the host", lambda f: _bytes(f.d2h_bytes)),
    ("measured", lambda f: _ns(f.wall_ns)),
    ("predicted", lambda f: _ns(f.predicted_ns)),
    ("error", _error),
    ("modelled", lambda f: _ns(f.modelled_ns)),
    ("modelled, to the device", lambda f: _bytes(f.modelled_h2d_bytes)),
    ("least bytes", lambda f: _bytes(f.lower_bound_bytes)),
    ("least time", lambda f: _ns(f.lower_bound_ns)),
    ("time over least", lambda f: _ratio(f.modelled_ns, f.lower_bound_ns)),
)


def _of_phase(phase: str) -> list[Column]:
    def column(show: Callable[[PhaseFigures], str]) -> Callable[[Run], str]:
        return lambda run: show(getattr(run, phase))

    return [(heading, column(show)) for heading, show in _PHASE]


GROUPS: dict[str, list[Column]] = {
    "run": [
        ("tokens equal", _equal),
        ("budget", lambda r: _bytes(r.budget_bytes)),
        ("weights", lambda r: _bytes(r.weight_bytes)),
        ("peak on the device", lambda r: _bytes(r.peak_bytes)),
        ("peak over budget", lambda r: _ratio(r.peak_bytes, r.budget_bytes)),
        ("host memory", lambda r: _bytes(r.host_bytes)),
        ("pinned", lambda r: _bytes(r.pinned_bytes)),
    ],
    "decode step": [
        *_of_phase("decode"),
        ("tokens/s, measured", lambda r: _tokens_per_s(r, r.decode.wall_ns)),
        ("tokens/s, modelled", lambda r: _tokens_per_s(r, r.decode.modelled_ns)),
        ("link", lambda r: _rate(r.link_bytes_per_s)),
        ("pinned copy", lambda r: _rate(r.probe_bytes_per_s)),
        ("link over pinned copy", lambda r: _ratio(r.link_bytes_per_s, r.probe_bytes_per_s, ".0%")),
    ],
    "prefill": _of_phase("prefill"),
    "time to first token": [
        ("all", lambda r: _ns(_first_token_ns(r))),
        ("loading", lambda r: _ns(r.load_ns)),
        ("capture", lambda r: _ns(r.capture_ns)),
        ("planning", lambda r: _ns(r.plan_ns)),
        ("computing", lambda r: _ns(_computing_ns(r))),
    ],
    "settings": [("as a user would write them", _settings)],
}
"""The columns of the table of runs, by their group."""


def used_groups(runs: Sequence[Run]) -> dict[str, list[Column]]:
    """Return the columns in which at least one run has a figure."""
    found = {
        group: [c for c in columns if any(c[1](run) != NONE for run in runs)]
        for group, columns in GROUPS.items()
    }
    return {group: columns for group, columns in found.items() if columns}
