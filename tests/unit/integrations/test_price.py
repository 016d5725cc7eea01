"""How many tokens a draft makes: the price of a round against a search over all lengths."""

from __future__ import annotations

import random

import pytest

from ds_finepage.integrations.transformers.price import (
    LENGTHS,
    PRIOR_ACCEPTANCE,
    ROUNDS_BETWEEN_TRIALS,
    Price,
    best_length,
    tokens_a_round,
)

STEP_NS, PASS_NS = 1.0, 20.0


def rate(acceptance: float, length: int, step_ns: float, pass_ns: float) -> float:
    return tokens_a_round(acceptance, length) / (length * step_ns + pass_ns)


@pytest.mark.parametrize("acceptance", [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("pass_ns", [2.0, 5.0, 20.0, 80.0])
def test_the_length_is_nearly_the_best_of_all(acceptance: float, pass_ns: float) -> None:
    best = max(rate(acceptance, length, STEP_NS, pass_ns) for length in range(33))
    chosen = best_length(acceptance, STEP_NS, pass_ns)
    assert rate(acceptance, chosen, STEP_NS, pass_ns) >= 0.95 * best


@pytest.mark.parametrize("acceptance", [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("step_ns", [0.01, 0.03, 0.1, 0.2, 0.3])
def test_an_acceptance_that_is_observed_costs_little(acceptance: float, step_ns: float) -> None:
    drawn, price, num_tokens, time_ns = random.Random(0), Price(), 0, 0.0
    for _ in range(8_000):
        num_drafted = price.length()
        num_accepted = 0
        while num_accepted < num_drafted and drawn.random() < acceptance:
            num_accepted += 1
        if num_drafted:
            price.note_steps(num_drafted, num_drafted * step_ns)
            price.note_check(num_drafted, num_accepted)
        price.note_pass(1.0)
        num_tokens += num_accepted + 1
        time_ns += num_drafted * step_ns + 1.0
    best = max(rate(acceptance, length, step_ns, 1.0) for length in range(33))
    assert num_tokens / time_ns >= 0.95 * best


def noted(rounds: list[tuple[int, int]], pass_ns: float = PASS_NS) -> Price:
    price = Price()
    for num_drafted, num_accepted in rounds:
        price.note_steps(num_drafted, num_drafted * STEP_NS)
        price.note_pass(pass_ns)
        price.note_check(num_drafted, num_accepted)
    return price


def test_before_times_are_known_a_few_tokens_are_drafted() -> None:
    price = Price()
    assert price.acceptance == pytest.approx(PRIOR_ACCEPTANCE)
    assert price.length() == 6
    price.note_pass(PASS_NS)
    assert price.length() == 6
    price.note_steps(2, 2 * STEP_NS)
    assert price.length() == best_length(PRIOR_ACCEPTANCE, STEP_NS, PASS_NS)


def test_what_is_accepted_decides() -> None:
    good, bad = noted([(6, 6)] * 30), noted([(6, 1)] * 30)
    assert good.acceptance > 0.95 and good.length() == LENGTHS[-1]
    assert bad.acceptance == pytest.approx(0.5, abs=0.05)  # one of two that were checked
    assert bad.length() < good.length()
    assert (bad.num_drafted, bad.num_accepted, bad.num_checks) == (180, 30, 30)


def test_the_last_rounds_count_most() -> None:
    assert noted([(6, 6)] * 30 + [(6, 0)] * 20).acceptance < 0.5


def test_a_draft_that_is_never_right_rests_and_is_tried_now_and_then() -> None:
    price = noted([(6, 0)] * 60)
    lengths, lost = [], []
    for _ in range(2 * ROUNDS_BETWEEN_TRIALS):
        lengths.append(price.length())
        lost.append(price.has_lost)
    assert sum(lengths) == 2
    assert lengths[ROUNDS_BETWEEN_TRIALS - 1] == lengths[-1] == 1
    assert lost[-1] and not any(lost[:-1])
    for _ in range(40):
        price.note_check(6, 6)
    assert price.length() and not price.has_lost  # it pays again
    price.most = 0  # it is given up
    assert {price.length() for _ in range(2 * ROUNDS_BETWEEN_TRIALS)} == {0}


@pytest.mark.parametrize(("room_share", "num_rounds"), [(0.0, None), (0.1, None), (1 / 3, 16)])
def test_a_draft_has_to_be_worth_its_room(room_share: float, num_rounds: int | None) -> None:
    price = noted([(1, 1), (6, 0), (6, 0), (6, 0)] * 20)  # of four tokens one is right: 1.2 times
    assert price.length() == 1
    price.room_share, price._num_idle = room_share, 0
    lost = (n for n in range(1, 100) if price.length() and price.has_lost)
    assert next(lost, None) == num_rounds
    price = noted([(6, 6)] * 30)
    price.room_share = room_share
    assert not any(price.has_lost for _ in range(100) if price.length())


def test_a_slow_first_round_is_forgotten() -> None:
    price = noted([(6, 6)], pass_ns=1e9)
    assert price.length() == LENGTHS[-1]
    for _ in range(4):
        price.note_pass(PASS_NS)
    assert price.length() == best_length(price.acceptance, STEP_NS, PASS_NS)
