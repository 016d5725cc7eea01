"""The tables of a comparison, narrow enough for a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from rich.table import Table

from ds_finepage.compare.judge import holds_budget, is_modelled, time_of, winners
from ds_finepage.reporting.results import PhaseFigures, Results, Run, notes_of
from ds_finepage.units import format_bytes, format_ns

UNKNOWN = "-"
Cell = Callable[[Run], str]

NOTES_CPU = """\
On the CPU a fetch of stock ZeRO-Inference copies nothing; the counted calls make it copy. So times
are modelled by the simulator for {hardware}, from the same transfers and ops. Wall times are of
this CPU, without those copies: do not compare engines by them."""

NOTES = """\
Peak: a meter reads the allocator from just before the weights go to the device; "!" is above the
budget. Bytes: of the last counted prefill and decode step. First token: loading, capture, planning
and computing of the first call. Bound: no schedule of one batch at a time is below it."""


def tables(results: Results, batch: int) -> Iterator[Table]:
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
        yield _table(f"Bytes, counted: {within}", BYTES, ran)
        ranks = list(_of_ranks(ran))
        if ranks:
            yield _table(f"Ranks, counted: {within}", RANKS, ranks)
        if is_modelled(results) and results.settings is not None:
            card = results.settings.hardware
            yield _table(f"Time, modelled for {card}: {within}", MODELLED_TIMES, ran)
        else:
            yield _table(f"Time, measured: {within}", WALL_TIMES, ran)
        yield _table(f"First token and host memory, measured: {within}", FIRST_TOKEN, ran)
        planned = [run for run in ran if run.decode.predicted_ns is not None]
        if planned:
            yield _table(f"Link and prediction, measured: {within}", PREDICTIONS, planned)
    failed = [run for run in runs if run.reason is not None]
    if failed:
        yield _table(f"Did not run: batch {batch}", REASONS, failed, justify="left")


def remarks(results: Results, batch: int) -> Iterator[str]:
    """Yield what stands below the tables of a batch: winners, settings, notes.

    Args:
        results: The results.
        batch: Sequences in the batch.
    """
    for winner in winners(results, batch):
        yield f"Batch {batch}, {winner.text()}."
    runs = [run for run in results.runs if run.batch == batch]
    for run in runs:
        if run.settings:
            yield f"Settings of {run.arm}: {json.dumps(run.settings)}"
    arms = {run.name: run.arm for run in runs if run.reason is None}
    for note, names in notes_of(runs).items():
        is_of_all = len(names) == len(arms) > 1
        yield f"{'all arms' if is_of_all else ', '.join(arms[n] for n in names)}: {note}"


def footnotes(results: Results) -> str:
    """Return what holds for all tables."""
    if is_modelled(results) and results.settings is not None:
        return f"{NOTES}\n{NOTES_CPU.format(hardware=results.settings.hardware)}"
    return NOTES


def _of_ranks(runs: Sequence[Run]) -> Iterator[Run]:
    """Yield each run on several ranks once a rank, with the rank behind the name of its arm."""
    for run in runs:
        for rank in range(len(run.ranks)):
            found = run.of_rank(rank)
            yield replace(found, arm=f"{run.arm}, rank {rank}")


def _table(
    title: str,
    columns: Sequence[tuple[str, Cell]],
    runs: Sequence[Run],
    justify: str = "right",
) -> Table:
    table = Table(title=title, title_justify="left", padding=(0, 0, 0, 1))
    for name, _ in columns:
        left = name == "arm" or justify == "left"
        table.add_column(name, justify="left" if left else "right", no_wrap=name == "arm")
    for run in runs:
        table.add_row(*(cell(run) for _, cell in columns))
    return table


# Cells.


def _bytes(num_bytes: int | None) -> str:
    return UNKNOWN if num_bytes is None else format_bytes(num_bytes)


def _time(time_ns: int | None) -> str:
    return UNKNOWN if time_ns is None else format_ns(time_ns)


def _ms(time_ns: int | None) -> str:
    return UNKNOWN if time_ns is None else f"{time_ns / 1e6:.2f}"


def _ratio(found: float | None, bound: float | None) -> str:
    return UNKNOWN if found is None or not bound else f"{found / bound:.2f}"


def _equal(run: Run) -> str:
    return {True: "yes", False: "NO", None: UNKNOWN}[run.tokens_equal]


def _peak(run: Run) -> str:
    return _bytes(run.peak_bytes) + ("" if holds_budget(run) else " !")


def _rate(run: Run, time_ns: int | None) -> str:
    return UNKNOWN if not time_ns else f"{run.batch * 1e9 / time_ns:.2f}"


def _modelled(phase: PhaseFigures) -> int | None:
    return time_of(phase, modelled=True)


def _wall(phase: PhaseFigures) -> int | None:
    return time_of(phase, modelled=False)


def _bytes_over_bound(phase: PhaseFigures) -> str:
    return _ratio(phase.h2d_bytes, phase.lower_bound_bytes)


def _time_over_bound(phase: PhaseFigures) -> str:
    return _ratio(phase.modelled_ns, phase.lower_bound_ns)


def _first_token_ns(run: Run) -> int | None:
    if run.load_ns is None or run.prefill.wall_ns is None:
        return None
    return run.load_ns + (run.capture_ns or 0) + (run.plan_ns or 0) + run.prefill.wall_ns


def _error(phase: PhaseFigures) -> str:
    if phase.predicted_ns is None or not phase.wall_ns:
        return UNKNOWN
    return f"{phase.predicted_ns / phase.wall_ns - 1:+.0%}"


_ARM: tuple[str, Cell] = ("arm", lambda r: r.arm)

BYTES: tuple[tuple[str, Cell], ...] = (
    _ARM,
    ("tokens equal", _equal),
    ("peak", _peak),
    ("prefill to device", lambda r: _bytes(r.prefill.h2d_bytes)),
    ("to host", lambda r: _bytes(r.prefill.d2h_bytes)),
    ("step to device", lambda r: _bytes(r.decode.h2d_bytes)),
    ("to host", lambda r: _bytes(r.decode.d2h_bytes)),
    ("step / bound", lambda r: _bytes_over_bound(r.decode)),
)

RANKS: tuple[tuple[str, Cell], ...] = (
    *BYTES[:-1],
    ("host memory", lambda r: _bytes(r.host_bytes)),
)

MODELLED_TIMES: tuple[tuple[str, Cell], ...] = (
    _ARM,
    ("prefill ms", lambda r: _ms(_modelled(r.prefill))),
    ("/ bound", lambda r: _time_over_bound(r.prefill)),
    ("ms a token", lambda r: _ms(_modelled(r.decode))),
    ("/ bound", lambda r: _time_over_bound(r.decode)),
    ("tokens/s", lambda r: _rate(r, _modelled(r.decode))),
    ("wall ms, prefill", lambda r: _ms(_wall(r.prefill))),
    ("wall ms, token", lambda r: _ms(_wall(r.decode))),
)

WALL_TIMES: tuple[tuple[str, Cell], ...] = (
    _ARM,
    ("prefill ms", lambda r: _ms(_wall(r.prefill))),
    ("ms a token", lambda r: _ms(_wall(r.decode))),
    ("tokens/s", lambda r: _rate(r, _wall(r.decode))),
    ("modelled ms a token", lambda r: _ms(_modelled(r.decode))),
    ("modelled / bound", lambda r: _time_over_bound(r.decode)),
)

FIRST_TOKEN: tuple[tuple[str, Cell], ...] = (
    _ARM,
    ("first token", lambda r: _time(_first_token_ns(r))),
    ("loading", lambda r: _time(r.load_ns)),
    ("capture", lambda r: _time(r.capture_ns)),
    ("planning", lambda r: _time(r.plan_ns)),
    ("computing", lambda r: _time(r.prefill.wall_ns)),
    ("host memory", lambda r: _bytes(r.host_bytes)),
    ("pinned", lambda r: _bytes(r.pinned_bytes)),
)

PREDICTIONS: tuple[tuple[str, Cell], ...] = (
    _ARM,
    ("link / probe", lambda r: _ratio(r.link_bytes_per_s, r.probe_bytes_per_s)),
    ("prefill ms", lambda r: _ms(_wall(r.prefill))),
    ("predicted", lambda r: _ms(r.prefill.predicted_ns)),
    ("error", lambda r: _error(r.prefill)),
    ("step ms", lambda r: _ms(_wall(r.decode))),
    ("predicted", lambda r: _ms(r.decode.predicted_ns)),
    ("error", lambda r: _error(r.decode)),
)

REASONS: tuple[tuple[str, Cell], ...] = (_ARM, ("why", lambda r: r.reason or ""))
