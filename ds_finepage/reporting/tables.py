"""The tables of runs, for the terminal and the page; narrow enough for a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ds_finepage.reporting.results import PhaseFigures, Results, Run
from ds_finepage.units import NS_PER_S, format_bytes, format_ns

NONE = "-"

NOTES_CPU = """\
On the CPU a fetch of stock ZeRO-Inference copies nothing; the counted calls make it copy. So times
are modelled by the simulator for {hardware}, from the same transfers and ops. Wall times are of
this CPU, without those copies: do not compare engines by them."""

NOTES = """\
Peak: a meter reads the allocator from just before the weights go to the device; "!" is above the
budget. Bytes: of the last counted prefill and decode step. First token: loading, and the first
forward, which captures, plans and computes with the meter on. Bound: no schedule of
one batch at a time is below it."""

Column = tuple[str, Callable[[Run], str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTable:
    """A table with a line for each run."""

    title: str
    columns: Sequence[Column]
    runs: Sequence[Run]


def tables(results: Results, batch: int) -> Iterator[RunTable]:
    """Make the tables of one batch.

    Args:
        results: The results.
        batch: Sequences in the batch.
    """
    runs = [run for run in results.runs if run.batch == batch]
    ran = [run for run in runs if run.reason is None]
    if ran:
        budget = format_bytes(ran[0].budget_bytes or 0)
        weights = format_bytes(ran[0].weight_bytes or 0)
        within = f"batch {batch}, budget {budget}, weights {weights}"
        times, columns_of_times = "Time, measured", WALL_TIMES
        if results.is_modelled and results.settings is not None:
            times = f"Time, modelled for {results.settings.hardware}"
            columns_of_times = MODELLED_TIMES
        planned = [run for run in ran if run.decode.predicted_ns is not None]
        for title, columns, shown in (
            ("Bytes, counted", BYTES, ran),
            ("Ranks, counted", RANKS, list(_of_ranks(ran))),
            (times, columns_of_times, ran),
            ("First token and host memory, measured", FIRST_TOKEN, ran),
            ("Link and prediction, measured", PREDICTIONS, planned),
        ):
            if shown:
                yield RunTable(title=f"{title}: {within}", columns=columns, runs=shown)
    failed = [run for run in runs if run.reason is not None]
    if failed:
        yield RunTable(title=f"Did not run: batch {batch}", columns=REASONS, runs=failed)


def remarks(results: Results, batch: int) -> Iterator[str]:
    """Yield what stands below the tables of a batch: settings, and each note once.

    Args:
        results: The results.
        batch: Sequences in the batch.
    """
    runs = [run for run in results.runs if run.batch == batch]
    for run in runs:
        if run.settings:
            yield f"Settings of {run.arm}: {json.dumps(run.settings)}"
    ran = [run for run in runs if run.reason is None]
    for note in dict.fromkeys(note for run in ran for note in run.notes):
        arms = [run.arm for run in ran if note in run.notes]
        yield f"{'all arms' if len(arms) == len(ran) > 1 else ', '.join(arms)}: {note}"


def footnotes(results: Results) -> str:
    """Return what holds for all tables."""
    if results.is_modelled and results.settings is not None:
        return f"{NOTES}\n{NOTES_CPU.format(hardware=results.settings.hardware)}"
    return NOTES


def _of_ranks(runs: Sequence[Run]) -> Iterator[Run]:
    """Yield each run on several ranks once a rank, with the rank behind the name of its arm."""
    for run in runs:
        for rank, found in enumerate(run.ranks):
            yield replace(found, arm=f"{run.arm}, rank {rank}")


# Cells.


def bytes_or_dash(value: int | None) -> str:
    """Print a size; a dash where it is not known."""
    return NONE if value is None else format_bytes(value)


def _time(value: int | None) -> str:
    return NONE if value is None else format_ns(value)


def _ms(time_ns: int | None) -> str:
    return NONE if time_ns is None else f"{time_ns / 1e6:.2f}"


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}" if value is not None and base else NONE


def _error(figures: PhaseFigures) -> str:
    if figures.predicted_ns is None or not figures.wall_ns:
        return NONE
    return f"{figures.predicted_ns / figures.wall_ns - 1:+.0%}"


def _tokens_per_s(run: Run, ns: int | None) -> str:
    return f"{run.batch * NS_PER_S / ns:.2f}" if ns else NONE


def _peak(run: Run) -> str:
    return bytes_or_dash(run.peak_bytes) + ("" if run.holds_budget else " !")


_ARM: Column = ("arm", lambda r: r.arm)

BYTES: tuple[Column, ...] = (
    _ARM,
    ("tokens equal", lambda r: {True: "yes", False: "NO", None: NONE}[r.tokens_equal]),
    ("peak", _peak),
    ("prefill to device", lambda r: bytes_or_dash(r.prefill.h2d_bytes)),
    ("to host", lambda r: bytes_or_dash(r.prefill.d2h_bytes)),
    ("step to device", lambda r: bytes_or_dash(r.decode.h2d_bytes)),
    ("to host", lambda r: bytes_or_dash(r.decode.d2h_bytes)),
    ("step / bound", lambda r: _ratio(r.decode.h2d_bytes, r.decode.lower_bound_bytes)),
)

RANKS: tuple[Column, ...] = (*BYTES[:-1], ("host memory", lambda r: bytes_or_dash(r.host_bytes)))

MODELLED_TIMES: tuple[Column, ...] = (
    _ARM,
    ("prefill ms", lambda r: _ms(r.prefill.modelled_ns)),
    ("/ bound", lambda r: _ratio(r.prefill.modelled_ns, r.prefill.lower_bound_ns)),
    ("ms a token", lambda r: _ms(r.decode.modelled_ns)),
    ("/ bound", lambda r: _ratio(r.decode.modelled_ns, r.decode.lower_bound_ns)),
    ("tokens/s", lambda r: _tokens_per_s(r, r.decode.modelled_ns)),
    ("wall ms, prefill", lambda r: _ms(r.prefill.wall_ns)),
    ("wall ms, token", lambda r: _ms(r.decode.wall_ns)),
)

WALL_TIMES: tuple[Column, ...] = (
    _ARM,
    ("prefill ms", lambda r: _ms(r.prefill.wall_ns)),
    ("ms a token", lambda r: _ms(r.decode.wall_ns)),
    ("tokens/s", lambda r: _tokens_per_s(r, r.decode.wall_ns)),
    ("modelled ms a token", lambda r: _ms(r.decode.modelled_ns)),
    ("modelled / bound", lambda r: _ratio(r.decode.modelled_ns, r.decode.lower_bound_ns)),
)

FIRST_TOKEN: tuple[Column, ...] = (
    _ARM,
    ("first token", lambda r: _time(r.first_token_ns)),
    ("loading", lambda r: _time(r.load_ns)),
    ("first call", lambda r: _time(r.first_call_ns)),
    ("host memory", lambda r: bytes_or_dash(r.host_bytes)),
    ("pinned", lambda r: bytes_or_dash(r.pinned_bytes)),
)

PREDICTIONS: tuple[Column, ...] = (
    _ARM,
    ("link / probe", lambda r: _ratio(r.link_bytes_per_s, r.probe_bytes_per_s)),
    ("prefill ms", lambda r: _ms(r.prefill.wall_ns)),
    ("predicted", lambda r: _ms(r.prefill.predicted_ns)),
    ("error", lambda r: _error(r.prefill)),
    ("step ms", lambda r: _ms(r.decode.wall_ns)),
    ("predicted", lambda r: _ms(r.decode.predicted_ns)),
    ("error", lambda r: _error(r.decode)),
)

REASONS: tuple[Column, ...] = (_ARM, ("why", lambda r: r.reason or ""))
