"""Every figure of the runs, as columns of tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_finepage.reporting.results import PhaseFigures, Run
from ds_finepage.units import format_bytes, format_ns

NONE = "-"
NS_PER_S = 10**9


def in_bytes(value: int | None) -> str:
    """Show a number of bytes."""
    return NONE if value is None else format_bytes(value)


def in_time(value: int | None) -> str:
    """Show a time in nanoseconds."""
    return NONE if value is None else format_ns(value)


def ratio(value: float | None, base: float | None, form: str = ".2f") -> str:
    """Show a figure over another one."""
    return format(value / base, form) if value is not None and base else NONE


def error(figures: PhaseFigures, form: str = "+.1%") -> str:
    """Show how far a prediction was from the measured time."""
    if figures.predicted_ns is None or not figures.wall_ns:
        return NONE
    return format(figures.predicted_ns / figures.wall_ns - 1, form)


def first_token_ns(run: Run) -> int | None:
    """Return the time from the start to the first token, as far as its parts are known."""
    parts = (run.load_ns, run.capture_ns, run.plan_ns, run.prefill.wall_ns)
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def tokens_per_s(run: Run, ns: int | None) -> str:
    """Show the speed of a run whose step takes a time."""
    return f"{run.batch * NS_PER_S / ns:.2f}" if ns else NONE


def equal(run: Run) -> str:
    """Show whether a run has the tokens of plain transformers."""
    return {True: "yes", False: "NO", None: NONE}[run.tokens_equal]


def _rate(value: float | None) -> str:
    return NONE if value is None else f"{value / 1e9:.2f} GB/s"


def _settings(run: Run) -> str:
    return ", ".join(f"{name}: {value}" for name, value in run.settings.items()) or NONE


Column = tuple[str, Callable[[Run], str]]

_PHASE: Sequence[tuple[str, Callable[[PhaseFigures], str]]] = (
    ("to the device", lambda f: in_bytes(f.h2d_bytes)),
    ("to the host", lambda f: in_bytes(f.d2h_bytes)),
    ("measured", lambda f: in_time(f.wall_ns)),
    ("predicted", lambda f: in_time(f.predicted_ns)),
    ("error", error),
    ("modelled", lambda f: in_time(f.modelled_ns)),
    ("modelled, to the device", lambda f: in_bytes(f.modelled_h2d_bytes)),
    ("least bytes", lambda f: in_bytes(f.lower_bound_bytes)),
    ("least time", lambda f: in_time(f.lower_bound_ns)),
    ("time over least", lambda f: ratio(f.modelled_ns, f.lower_bound_ns)),
)


def _of_phase(phase: str) -> list[Column]:
    def column(show: Callable[[PhaseFigures], str]) -> Callable[[Run], str]:
        return lambda run: show(getattr(run, phase))

    return [(heading, column(show)) for heading, show in _PHASE]


GROUPS: dict[str, list[Column]] = {
    "run": [
        ("tokens equal", equal),
        ("budget", lambda r: in_bytes(r.budget_bytes)),
        ("weights", lambda r: in_bytes(r.weight_bytes)),
        ("peak on the device", lambda r: in_bytes(r.peak_bytes)),
        ("peak over budget", lambda r: ratio(r.peak_bytes, r.budget_bytes)),
        ("host memory", lambda r: in_bytes(r.host_bytes)),
        ("pinned", lambda r: in_bytes(r.pinned_bytes)),
    ],
    "decode step": [
        *_of_phase("decode"),
        ("tokens/s, measured", lambda r: tokens_per_s(r, r.decode.wall_ns)),
        ("tokens/s, modelled", lambda r: tokens_per_s(r, r.decode.modelled_ns)),
        ("link", lambda r: _rate(r.link_bytes_per_s)),
        ("pinned copy", lambda r: _rate(r.probe_bytes_per_s)),
        ("link over pinned copy", lambda r: ratio(r.link_bytes_per_s, r.probe_bytes_per_s, ".0%")),
    ],
    "prefill": _of_phase("prefill"),
    "time to first token": [
        ("all", lambda r: in_time(first_token_ns(r))),
        ("loading", lambda r: in_time(r.load_ns)),
        ("capture", lambda r: in_time(r.capture_ns)),
        ("planning", lambda r: in_time(r.plan_ns)),
        ("computing", lambda r: in_time(r.prefill.wall_ns)),
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
