"""The rounds of a draft: which times count for its price, and whose sequence is whose."""

from __future__ import annotations

from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from ds_finepage.integrations.transformers.drafting import DraftGeneration

VOCABULARY = 8


class FakeDraft(torch.nn.Module):
    """A draft that makes as many tokens as it is asked for."""

    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=VOCABULARY))

    def generate(self, **given: Any) -> Any:
        ids, length = given["input_ids"], given["max_new_tokens"]
        more = torch.zeros((1, length), dtype=ids.dtype)
        scores = (torch.zeros(1, VOCABULARY),) * length
        return SimpleNamespace(sequences=torch.cat([ids, more], dim=1), scores=scores)


@pytest.mark.parametrize("is_planned", [False, True])
def test_the_time_of_a_plan_is_no_time_of_a_draft_or_pass(is_planned: bool) -> None:
    generation = DraftGeneration(FakeDraft(), is_stand_in=False)
    num_calls = 0

    def num_plans() -> int:
        nonlocal num_calls
        num_calls += 1
        return num_calls if is_planned else 7

    generation.num_plans = num_plans
    config = SimpleNamespace(is_assistant=True, do_sample=False)
    for length in (5, 6, 9, 12):  # the second round has no draft
        ids = torch.zeros((1, length), dtype=torch.int64)
        generation(input_ids=ids, generation_config=config, max_new_tokens=10)
    price = generation.price
    assert price.num_checks >= 1
    assert bool(price._step_ns) is bool(price._pass_ns) is not is_planned


def test_each_thread_has_a_sequence_of_its_own() -> None:
    generation = DraftGeneration(FakeDraft(), is_stand_in=True)
    mine, theirs = DynamicCache(), DynamicCache()
    generation.see_pass({"past_key_values": mine})
    other = Thread(target=generation.see_pass, args=({"past_key_values": theirs},))
    other.start()
    other.join()
    assert generation._model_cache is mine
