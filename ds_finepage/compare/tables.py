"""The tables of a comparison, narrow enough for a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from rich.table import Table

from ds_finepage.compare.judge import holds_budget, is_modelled, winners
from ds_finepage.reporting.columns import (
    NONE,
    equal,
    error,
    first_token_ns,
    in_bytes,
    in_time,
    ratio,
    tokens_per_s,
)
from ds_finepage.reporting.results import Results, Run, notes_of
from ds_finepage.reporting.tabular import table_of
from ds_finepage.units import format_bytes

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
        yield _table(f"Did not run: batch {batch}", REASONS, failed)


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


_table = partial(table_of, left=("arm", "why"), is_narrow=True)


# Cells.


def _ms(time_ns: int | None) -> str:
    return NONE if time_ns is None else f"{time_ns / 1e6:.2f}"


def _peak(run: Run) -> str:
    return in_bytes(run.peak_bytes) + ("" if holds_budget(run) else " !")


_ARM: tuple[str, Cell] = ("arm", lambda r: r.arm)

BYTES: tuple[tuple[str, Cell], ...] = (
    _ARM,
    ("tokens equal", equal),
    ("peak", _peak),
    ("prefill to device", lambda r: in_bytes(r.prefill.h2d_bytes)),
    ("to host", lambda r: in_bytes(r.prefill.d2h_bytes)),
    ("step to device", lambda r: in_bytes(r.decode.h2d_bytes)),
    ("to host", lambda r: in_bytes(r.decode.d2h_bytes)),
    ("step / bound", lambda r: ratio(r.decode.h2d_bytes, r.decode.lower_bound_bytes)),
)

RANKS: tuple[tuple[str, Cell], ...] = (
    *BYTES[:-1],
    ("host memory", lambda r: in_bytes(r.host_bytes)),
)

MODELLED_TIMES: tuple[tuple[str, Cell], ...] = (
    _ARM,
    ("prefill ms", lambda r: _ms(r.prefill.modelled_ns)),
    ("/ bound", lambda r: ratio(r.prefill.modelled_ns, r.prefill.lower_bound_ns)),
    ("ms a token", lambda r: _ms(r.decode.modelled_ns)),
    ("/ bound", lambda r: ratio(r.decode.modelled_ns, r.decode.lower_bound_ns)),
    ("tokens/s", lambda r: tokens_per_s(r, r.decode.modelled_ns)),
    ("wall ms, prefill", lambda r: _ms(r.prefill.wall_ns)),
    ("wall ms, token", lambda r: _ms(r.decode.wall_ns)),
)

WALL_TIMES: tuple[tuple[str, Cell], ...] = (
    _ARM,
    ("prefill ms", lambda r: _ms(r.prefill.wall_ns)),
    ("ms a token", lambda r: _ms(r.decode.wall_ns)),
    ("tokens/s", lambda r: tokens_per_s(r, r.decode.wall_ns)),
    ("modelled ms a token", lambda r: _ms(r.decode.modelled_ns)),
    ("modelled / bound", lambda r: ratio(r.decode.modelled_ns, r.decode.lower_bound_ns)),
)

FIRST_TOKEN: tuple[tuple[str, Cell], ...] = (
    _ARM,
    ("first token", lambda r: in_time(first_token_ns(r))),
    ("loading", lambda r: in_time(r.load_ns)),
    ("capture", lambda r: in_time(r.capture_ns)),
    ("planning", lambda r: in_time(r.plan_ns)),
    ("computing", lambda r: in_time(r.prefill.wall_ns)),
    ("host memory", lambda r: in_bytes(r.host_bytes)),
    ("pinned", lambda r: in_bytes(r.pinned_bytes)),
)

PREDICTIONS: tuple[tuple[str, Cell], ...] = (
    _ARM,
    ("link / probe", lambda r: ratio(r.link_bytes_per_s, r.probe_bytes_per_s)),
    ("prefill ms", lambda r: _ms(r.prefill.wall_ns)),
    ("predicted", lambda r: _ms(r.prefill.predicted_ns)),
    ("error", lambda r: error(r.prefill, "+.0%")),
    ("step ms", lambda r: _ms(r.decode.wall_ns)),
    ("predicted", lambda r: _ms(r.decode.predicted_ns)),
    ("error", lambda r: error(r.decode, "+.0%")),
)

REASONS: tuple[tuple[str, Cell], ...] = (_ARM, ("why", lambda r: r.reason or ""))
