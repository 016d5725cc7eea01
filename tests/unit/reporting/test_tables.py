"""Each figure is in its own cell, and the tables say what their times are."""

from __future__ import annotations

from typing import Any

from ds_finepage.reporting.results import PhaseFigures, Results
from ds_finepage.reporting.tables import footnotes, remarks, tables
from tests.unit.compare.runs import results, run

MS = 10**6

FULL = run(
    "finepage",
    tokens_equal=True,
    weight_bytes=2048,
    prefill=PhaseFigures(
        h2d_bytes=11,
        d2h_bytes=12,
        wall_ns=13 * MS,
        predicted_ns=26 * MS,
        modelled_ns=15 * MS,
        modelled_h2d_bytes=16,
        lower_bound_bytes=17,
        lower_bound_ns=10 * MS,
    ),
    decode=PhaseFigures(
        h2d_bytes=30,
        d2h_bytes=22,
        wall_ns=40 * MS,
        predicted_ns=30 * MS,
        modelled_ns=25 * MS,
        modelled_h2d_bytes=26,
        lower_bound_bytes=20,
        lower_bound_ns=20 * MS,
    ),
    load_ns=1000 * MS,
    first_token_ns=1240 * MS,
    first_call_ns=9 * MS,
    link_bytes_per_s=9.0,
    probe_bytes_per_s=10.0,
    host_bytes=41,
    pinned_bytes=42,
    settings={"policy": "finepage"},
    notes=("a remark",),
)


def shown(found: Results, batch: int = 1) -> dict[str, dict[str, list[str]]]:
    """Return begin of the title -> arm -> its cells, of all tables."""
    return {
        table.title.partition(":")[0]: {
            run.arm: [show(run) for _, show in table.columns[1:]] for run in table.runs
        }
        for table in tables(found, batch)
    }


def test_each_figure_is_in_its_cell_on_the_cpu() -> None:
    rows = shown(results(FULL))
    assert rows["Bytes, counted"]["finepage"] == [
        *("yes", "1000 B", "11 B", "12 B", "30 B", "22 B", "1.50")
    ]
    assert rows["Time, modelled for t4"]["finepage"] == [
        *("15.00", "1.50", "25.00", "1.25", "40.00", "13.00", "40.00")
    ]
    assert rows["First token and host memory, measured"]["finepage"] == [
        *("1.24 s", "1.00 s", "9.00 ms", "41 B", "42 B")
    ]
    assert rows["Link and prediction, measured"]["finepage"] == [
        *("0.90", "13.00", "26.00", "+100%", "40.00", "30.00", "-25%")
    ]
    titles = [table.title for table in tables(results(FULL), 1)]
    assert all("budget 1000 B, weights 2.00 KiB" in title for title in titles)
    assert "do not compare engines by them" in footnotes(results(FULL))


def test_on_an_accelerator_times_are_measured() -> None:
    rows = shown(results(FULL, device="NVIDIA T4"))
    assert rows["Time, measured"]["finepage"] == ["13.00", "40.00", "25.00", "25.00", "1.25"]
    assert "CPU" not in footnotes(results(FULL, device="NVIDIA T4"))


def test_a_figure_that_is_not_known_is_a_dash() -> None:
    rows = shown(results(run("zero")))
    assert rows["Bytes, counted"]["zero"][2:] == ["-"] * 5
    assert "Link and prediction, measured" not in rows
    assert set(rows["Time, modelled for t4"]["zero"]) == {"-"}


def test_other_tokens_and_a_peak_above_the_budget_are_marked() -> None:
    rows = shown(results(run("zero", tokens_equal=False, peak_bytes=1001)))
    assert rows["Bytes, counted"]["zero"][:2] == ["NO", "1001 B !"]


def test_an_arm_that_did_not_run_says_why_in_its_row() -> None:
    reason = "needs the package no_such: pip install no-such"
    rows = shown(results(run("static", reason=reason), FULL))
    assert rows["Did not run"] == {"static": [reason]}
    assert list(rows["Bytes, counted"]) == ["finepage"]
    assert list(shown(results(run("zero", reason=reason)))) == ["Did not run"]


def test_only_the_runs_of_the_batch_are_shown() -> None:
    rows = shown(results(FULL, run("zero", batch=8)), batch=8)
    assert list(rows["Bytes, counted"]) == ["zero"]


def test_settings_and_notes_stand_below() -> None:
    zero: Any = run("zero-persistence", 20 * MS, 30 * MS, settings={"stage3_x": 5})
    lines = list(remarks(results(zero, FULL, run("zero", batch=8, notes=("other",))), 1))
    assert 'Settings of zero-persistence: {"stage3_x": 5}' in lines
    assert lines[-1] == "finepage: a remark"
    assert not any("other" in line for line in lines if line.startswith("zero"))
