"""The fastest arm is named whoever it is, and faults are found."""

from __future__ import annotations

import pytest

from ds_finepage.compare.judge import Winner, problems_of, winners
from ds_finepage.reporting.results import Results, Run
from tests.unit.compare.runs import results, run


def by_part(found: Results, batch: int = 1) -> dict[str, Winner]:
    return {winner.part: winner for winner in winners(found, batch)}


def test_the_fastest_arm_of_each_part_wins_also_when_it_is_not_ours() -> None:
    found = by_part(results(run("zero", 500, 90), run("static", 300, 40), run("finepage", 200, 50)))
    assert {part: winner.run.arm for part, winner in found.items()} == {
        "prefill": "finepage",
        "decode step": "static",
        "whole generation": "finepage",  # 200 + 4 x 50 against 300 + 4 x 40
    }
    assert found["whole generation"].time_ns == 400
    assert found["decode step"].text() == (
        "decode step: static is fastest within the budget, 40 ns; "
        "finepage takes 1.25 x the time of the best other, static"
    )
    assert "finepage takes 0.67 x the time of the best other, static" in found["prefill"].text()


@pytest.mark.parametrize(
    "loser",
    [
        run("zero", 1, 1, peak_bytes=1001),
        run("zero", 1, 1, reason="out of memory", peak_bytes=None),
        run("zero", 1, 1, batch=8),
        run("zero", None, None),
    ],
)
def test_an_arm_above_the_budget_does_not_win(loser: Run) -> None:
    assert by_part(results(loser, run("finepage", 200, 50)))["prefill"].text() == (
        "prefill: finepage is fastest within the budget, 200 ns; no other system is within it"
    )


def test_our_other_policy_is_no_other_system() -> None:
    runs = (run("finepage-horizon", 100, 9), run("zero", 400, 9), run("finepage", 200, 9))
    text = by_part(results(*runs))["prefill"].text()
    assert text.startswith("prefill: finepage-horizon is fastest within the budget, 100 ns; ")
    assert text.endswith("finepage takes 0.50 x the time of the best other, zero")


def test_without_ours_the_winner_is_named_too() -> None:
    found = by_part(results(run("zero", 500, 90), run("finepage", 1, 1, peak_bytes=2000)))
    assert found["prefill"].text().endswith("500 ns; finepage is not among them")


def test_no_arm_with_a_time_is_no_winner() -> None:
    assert winners(results(run("plain")), 1) == []


def test_times_are_modelled_on_the_cpu_and_measured_elsewhere() -> None:
    runs = (run("zero", 500, 90), run("finepage", 200, 50))
    assert by_part(results(*runs))["prefill"].time_ns == 200
    assert by_part(results(*runs, device="NVIDIA T4"))["prefill"].time_ns == 1400


def test_other_tokens_and_a_budget_that_we_exceed_are_problems() -> None:
    found = results(
        run("plain", tokens_equal=True, peak_bytes=5000),
        run("zero", tokens_equal=False, peak_bytes=5000),
        run("finepage", tokens_equal=True, peak_bytes=1001),
        run("static", reason="too small", peak_bytes=None),
        run("finepage-horizon", tokens_equal=True),
    )
    assert problems_of(found) == [
        "batch 1: the tokens of zero differ",
        "batch 1: finepage had 1001 bytes on the device; the budget is 1000 bytes",
    ]
