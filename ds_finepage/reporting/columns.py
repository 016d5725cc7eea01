"""Every figure of the runs, as columns of tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ds_finepage.reporting.results import PhaseFigures, Run
from ds_finepage.units import format_bytes, format_ns

NONE = "-"
NS_PER_S = 10**9


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
