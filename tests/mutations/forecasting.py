"""Faults of forecasts: the time and the bytes of plans that are not written."""

from __future__ import annotations

from tests.mutations.mutant import mutant

TESTS = "property/test_forecasts.py"

FAULTS = (
    (
        "a-reload-waits-for-no-former-piece",
        "max(tenancy.vacators(extent), default=0)",
        "0",
    ),
    ("pieces-never-give-their-bytes-back", "tenancy.free(piece.extent, done_ns)", "pass"),
    (
        "a-task-does-not-wait-for-its-pieces",
        "ready_ns = max(ready_ns, piece.loaded_ns)",
        "pass",
    ),
    (
        "a-task-does-not-wait-for-looked-up-rows",
        "ready_ns = max(ready_ns, rows_ns[buffer])",
        "pass",
    ),
    ("a-join-is-left-out", "steps.append(_Step(index, _Part.JOIN, 0))", "pass"),
    (
        "kept-slices-take-no-room",
        "kept += weights.slice_bytes(weight, rows)",
        "pass",
    ),
    (
        "fixed-weights-are-not-kept",
        "self._weights, self._weights.fixed_bytes\n",
        "self._weights, 0\n",
    ),
    (
        "a-ring-of-slices-that-is-too-short-fits",
        "return room if room >= least_bytes else -1",
        "return room",
    ),
    (
        "the-host-takes-no-time-for-copies",
        "self._profile.host_copy_ns * num_copies",
        "self._profile.host_op_ns",
    ),
    (
        "a-forecast-counts-one-copy-for-a-slice-of-experts",
        "1 if end - start == weight.num_rows else weight.num_matrices",
        "1",
    ),
    (
        "looked-up-rows-move-no-bytes",
        "moved + sum(p.nbytes for p in pieces)",
        "sum(p.nbytes for p in pieces)",
    ),
    (
        "tasks-do-not-wait-for-copies-of-former-contents",
        "*(contents[b].used_ns for b in task.takes_from),",
        "",
    ),
    (
        "a-copy-does-not-wait-for-what-it-reads",
        "*(contents[b].made_ns for b in (*task.reads, *task.changes)),",
        "",
    ),
    (
        "a-task-overwrites-what-a-copy-reads",
        "*(contents[b].read_ns for b in task.changes),",
        "",
    ),
)

FORECASTING = (
    *(mutant(name, "planning/finepage/forecast.py", old, new, TESTS) for name, old, new in FAULTS),
    mutant(
        "a-pass-on-several-ranks-has-a-forecast",
        "planning/finepage/forecast.py",
        "graph.num_ranks == 1\n        and ",
        "",
        "unit/planning/finepage/test_forecast.py",
    ),
    mutant(
        "every-plan-is-written",
        "planning/finepage/streaming.py",
        "if self._forecaster is None:",
        "if True:",
        "unit/planning/finepage/test_forecast.py",
    ),
    mutant(
        "more-rows-stream-than-a-weight-has",
        "planning/finepage/choices.py",
        "max(0, weight.num_rows - nbytes // weight.row_bytes)",
        "weight.num_rows - nbytes // weight.row_bytes",
        "unit/planning/finepage/test_residency.py",
    ),
)
