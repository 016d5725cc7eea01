"""What an endpoint says of a budget before it loads a model."""

from __future__ import annotations

import pytest

from ds_finepage.serving.worth import LEAST_CONTEXT, NUM_TRIES, longest_context, warm_lengths


@pytest.mark.parametrize("power", [1, 1.5, 2])
@pytest.mark.parametrize("budget_bytes", [2_000, 50_000, 3_000_000])
def test_the_longest_context_has_room_and_a_longer_one_has_not(
    power: float, budget_bytes: int
) -> None:
    asked = []

    def least_bytes(seq: int) -> int:
        asked.append(seq)
        return 1000 + int(3 * seq**power)

    found = longest_context(least_bytes, 100_000, budget_bytes)
    assert least_bytes(found) <= budget_bytes and found >= LEAST_CONTEXT
    if power == 1 and found < 100_000:
        assert least_bytes(found + 2) > budget_bytes
    assert len(asked) <= NUM_TRIES + 4


def test_a_model_with_few_positions_takes_all_of_them() -> None:
    assert longest_context(lambda seq: seq, 100, 1000) == 100
    assert longest_context(lambda seq: seq, 8, 1000) == 8


def test_prompts_are_halved_and_the_first_kind_comes_twice() -> None:
    assert warm_lengths(200) == [128, 96, 64, 32, 16]
    assert warm_lengths(1 << 20)[:3] == [4096, 3072, 2048]
    assert warm_lengths(20) == [16, 12]
