"""A stand-in shares what has room, and a refusal names a budget that is enough."""

from __future__ import annotations

from functools import partial

import pytest

from ds_finepage.errors import PlanInfeasibleError
from ds_finepage.packing.form import PackedForm
from ds_finepage.runtime.drafts import layers_to_share

FORM = PackedForm.parse("int4", 64)


@pytest.mark.parametrize("vocabulary", [10, 2_000])
@pytest.mark.parametrize("largest_bytes", [4_000, 400_000])
@pytest.mark.parametrize("other_bytes", [0, 2_000_000])
def test_the_budget_that_a_refusal_names_is_enough(
    vocabulary: int, largest_bytes: int, other_bytes: int
) -> None:
    share = partial(
        layers_to_share,
        {f"layer {number}": 400_000 for number in range(8)},
        FORM,
        itemsize=2,
        other_bytes=other_bytes,
        largest_bytes=largest_bytes,
        vocabulary=vocabulary,
    )
    with pytest.raises(PlanInfeasibleError) as caught:
        share(budget_bytes=100_000)
    need = caught.value.min_budget_bytes
    assert need is not None
    assert len(share(budget_bytes=need)) <= 1  # nothing is left over
    with pytest.raises(PlanInfeasibleError):
        share(budget_bytes=need * 9 // 10)
    assert len(share(budget_bytes=3 * need)) > 1


def test_a_larger_table_of_logits_needs_a_larger_budget() -> None:
    needs = []
    for vocabulary in (10, 20_000):
        given = {"itemsize": 2, "other_bytes": 0, "largest_bytes": 4_000}
        with pytest.raises(PlanInfeasibleError) as caught:
            layers_to_share(
                {"layer": 400_000}, FORM, **given, vocabulary=vocabulary, budget_bytes=1_000
            )
        needs.append(caught.value.min_budget_bytes or 0)
    assert needs[0] < needs[1]
