"""A refusal of a stand-in names a budget that is enough."""

from __future__ import annotations

from functools import partial

import pytest

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.planning.budget import FULL_SHARE, competes
from ds_finepage.runtime.drafts import room_to_share


@pytest.mark.parametrize("cache_bytes", [0, 200_000, 5_000_000])
@pytest.mark.parametrize("vocabulary", [10, 2_000])
@pytest.mark.parametrize("largest_bytes", [4_000, 400_000])
@pytest.mark.parametrize("least_bytes", [900_000, 2_900_000])
def test_the_budget_that_a_refusal_names_is_enough(
    cache_bytes: int, vocabulary: int, largest_bytes: int, least_bytes: int
) -> None:
    room = partial(
        room_to_share,
        least_bytes,
        largest_bytes=largest_bytes,
        cache_bytes=cache_bytes,
        vocabulary=vocabulary,
    )
    with pytest.raises(PlanInfeasibleError) as caught:
        room(budget_bytes=100_000)
    need = caught.value.min_budget_bytes
    assert need is not None
    assert room(budget_bytes=need) <= 1  # nothing is left over
    with pytest.raises(PlanInfeasibleError):
        room(budget_bytes=need * 9 // 10)
    assert room(budget_bytes=3 * need) > need


def test_a_larger_table_of_logits_needs_a_larger_budget() -> None:
    needs = []
    for vocabulary in (10, 20_000):
        with pytest.raises(PlanInfeasibleError) as caught:
            room_to_share(
                100_000,
                largest_bytes=4_000,
                cache_bytes=0,
                vocabulary=vocabulary,
                budget_bytes=1_000,
            )
        needs.append(caught.value.min_budget_bytes or 0)
    assert needs[0] < needs[1]


@pytest.mark.parametrize("cache_bytes", [100_000, 400_000, 1_999_000, 9_000_000])
def test_a_cache_of_usual_length_has_room_unless_it_takes_a_fifth(cache_bytes: int) -> None:
    budget_bytes, least_bytes = 20_000_000, 1_000_000
    given = {"largest_bytes": 4_000, "cache_bytes": cache_bytes, "vocabulary": 10}
    shared = least_bytes + room_to_share(least_bytes, **given, budget_bytes=budget_bytes)
    left = budget_bytes - shared
    assert left >= budget_bytes // 16
    stays = not competes(cache_bytes, 10**9, left, share=FULL_SHARE)
    assert stays is (2 * cache_bytes < budget_bytes // 5)
